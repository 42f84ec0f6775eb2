"""`blockyard store`: what a store holds, by namespace and tenant, and the removal of a part of it.

`contents` defines a page of blocks and opens a URL; each storage has a module, and `report` sums pages up.
"""

from blockyard.tools.store.contents import Contents, DamagedBlock, Selection, StoredPage, open_contents
from blockyard.tools.store.report import StoredGroup, StoreReport, show, survey

__all__ = [
    "Contents",
    "DamagedBlock",
    "Selection",
    "StoreReport",
    "StoredGroup",
    "StoredPage",
    "open_contents",
    "show",
    "survey",
]
