"""Which strategy each operator gets: the problem, its solution, and the plan."""
