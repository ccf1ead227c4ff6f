"""`python -m autopar` is the command `autopar`."""

from .cli import main

if __name__ == "__main__":
    main()
