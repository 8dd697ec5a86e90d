"""Where numba keeps compiled kernels while tests run: it would name folders by the checkout."""

from pathlib import Path

from numba.core import caching

_Locator = getattr(caching, "UserProvidedCacheLocator", None) or caching._UserProvidedCacheLocator


class ByName(_Locator):  # type: ignore[misc,valid-type]
    """NUMBA_CACHE_DIR, with a folder for each folder of sources."""

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        return "-".join(Path(py_file).parts[-3:-1])
