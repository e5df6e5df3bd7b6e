"""Starts pacecar when python starts, then imports the `sitecustomize` that python would have found without it.

Python imports one module of this name at its start, the first on the path.  A folder in front of the path hides the
user's, the company's or the distribution's.  So this module takes its folder off the path again and imports the name
once more.  What is found then becomes `sys.modules["sitecustomize"]`; if there is none, the ImportError that python
expects goes on.
"""

import os
import sys

_folder = os.path.dirname(os.path.abspath(__file__))
try:
    import pacecar_startup  # type: ignore[import-not-found]  # beside this file, while its folder is on the path

    pacecar_startup.begin()
except Exception:  # noqa: BLE001  the script must start whatever is wrong here
    pass
sys.path[:] = [entry for entry in sys.path if entry != _folder]
sys.path_importer_cache.pop(_folder, None)
del sys.modules[__name__]
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401  the next one on the path
