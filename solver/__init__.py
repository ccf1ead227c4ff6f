"""Pure optimisation: choice graphs in, assignments with a bound out."""

from .assignment import Assignment as Assignment
from .assignment import Phase as Phase
from .choice_graph import ChoiceGraph as ChoiceGraph
from .choice_graph import Edge as Edge
from .choice_graph import Infeasible as Infeasible
from .choice_graph import Node as Node
from .solve import solve as solve
