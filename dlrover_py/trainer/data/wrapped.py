"""A map-style dataset around another one, which scripts may use like the other one."""

from typing import Any


class WrappedDataset:
    """Has the length and the attributes of the dataset that it wraps."""

    _own: frozenset[str] = frozenset({"_dataset"})
    """Names of the attributes that are not those of the dataset."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the dataset; a ``worker_init_fn`` may look for it."""
        if name.startswith("__"):  # while a copy is made, there is no dataset yet
            raise AttributeError(name)
        return getattr(self.__dict__["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the dataset, such as a file that a ``worker_init_fn`` opens."""
        if name in self._own or name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(self._dataset, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the dataset."""
        if name in self._own or name.startswith("__"):
            super().__delattr__(name)
        else:
            delattr(self._dataset, name)
