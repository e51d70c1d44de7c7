"""Who is whose neighbour in secure aggregation: everyone, a circle, or out-neighbours, with proven tails."""

from d2pfed.secagg.graph.graphs import (
    COMPLETE_UP_TO,
    SIGNED_COMPLETE_UP_TO,
    SIGNED_UP_TO,
    Circle,
    Complete,
    Consistency,
    Graph,
    OutNeighbours,
    Ranks,
    make_graph,
)
from d2pfed.secagg.graph.neighbourhood import (
    Neighbourhood,
    Risk,
    check_bounds,
    choose,
    complete,
    exposed,
    unopened,
)
from d2pfed.secagg.graph.tails import colluders_in_cohort, upper_tail

__all__ = [
    "Consistency",
    "Graph",
    "Complete",
    "Circle",
    "OutNeighbours",
    "Ranks",
    "make_graph",
    "COMPLETE_UP_TO",
    "SIGNED_COMPLETE_UP_TO",
    "SIGNED_UP_TO",
    "Risk",
    "Neighbourhood",
    "choose",
    "complete",
    "check_bounds",
    "unopened",
    "exposed",
    "upper_tail",
    "colluders_in_cohort",
]
