"""Automatic parallelization of unmodified JAX train steps."""

import os as _os

# An installed package holds solver/ and runtime/ in this folder; a checkout keeps them
# beside it, so there the parent folder is searched for them too.
if not _os.path.isdir(_os.path.join(_os.path.dirname(__file__), "solver")):
    __path__.append(_os.path.dirname(_os.path.dirname(_os.path.abspath(__file__))))
