"""Random directed graphs, and distances on them."""

import random
from collections import deque

from rl_modules.common.seeding import stream_seed


def random_graph(nodes: str, out_degree: int, seed: int) -> dict[str, str]:
    """Returns a directed graph in which every node is reached from every other.

    Args:
        nodes: their letters.
        out_degree: edges that leave each.
        seed: of the graph.

    Returns:
        The successors of each node, in alphabetical order.
    """
    rng = random.Random(stream_seed(seed, 0, "graph"))
    trip = rng.sample(nodes, len(nodes))
    following = dict(zip(trip, trip[1:] + trip[:1], strict=True))
    edges = {}
    for node in nodes:
        others = [other for other in nodes if other not in (node, following[node])]
        edges[node] = "".join(sorted([following[node], *rng.sample(others, out_degree - 1)]))
    return edges


def distances(edges: dict[str, str], start: str) -> dict[str, int]:
    """Steps of the shortest path from ``start`` to every node, by breadth-first search."""
    reached = {start: 0}
    queue = deque([start])
    while queue:
        here = queue.popleft()
        for node in edges[here]:
            if node not in reached:
                reached[node] = reached[here] + 1
                queue.append(node)
    return reached
