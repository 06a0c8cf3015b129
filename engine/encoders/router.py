"""Routes: a Router of sentence-transformers whose queries need no inference.

A document goes through a SPLADE model. A query has its words, each with a weight from a table (SparseStaticEmbedding,
arXiv 2411.04403).
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from ..errors import ModelError
from ..files.folder import read_json
from ..files.wording import shown

_QUERY, _DOCUMENT = "query", "document"
_STATIC, _PREDICTING, _POOLING = "SparseStaticEmbedding", ("MLMTransformer", "Transformer"), "SpladePooling"


class Routes(Struct, frozen=True):
    """The folders of a Router's modules. `default` is the route of a text that has none."""

    query: Path
    transformer: Path
    pooling: Path
    default: str


def read_routes(folder: Path) -> Routes:
    """Raises ModelError for a Router of other modules."""
    path = folder / "router_config.json"
    config = read_json(path)
    types, structure, parameters = (config.get(name) for name in ("types", "structure", "parameters"))
    if not (isinstance(types, dict) and isinstance(structure, dict) and structure):
        raise ModelError(f"{path} must have the objects types and structure, as sentence-transformers writes them")
    routes = {
        route: [(str(types.get(str(name))).rpartition(".")[2], folder / str(name)) for name in names]
        for route, names in structure.items()
        if isinstance(names, list)
    }
    found = {route: [kind for kind, _ in modules] for route, modules in routes.items()}
    query, document = found.get(_QUERY), found.get(_DOCUMENT, [])
    served = query == [_STATIC] and document[1:] == [_POOLING] and document[0] in _PREDICTING
    if not served or len(structure) != 2:
        raise ModelError(
            f"{path} has the routes {shown(found)}; a Router is served if its queries go through a {_STATIC} and its "
            f"documents through a {_PREDICTING[0]} and a {_POOLING}"
        )
    default = parameters.get("default_route") if isinstance(parameters, dict) else None
    if default is None:
        default = next(iter(routes))
    if default not in [*routes]:
        raise ModelError(f"{path}: default_route must be {_QUERY} or {_DOCUMENT}, got {shown(default)}")
    (_, transformer), (_, pooling) = routes[_DOCUMENT]
    return Routes(routes[_QUERY][0][1], transformer, pooling, default)
