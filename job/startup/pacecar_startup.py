"""Registers pacecar's optimizer hook once the script itself has imported torch, in processes that may be a rank.

Importing torch early would change the order of imports and cost a process that does not need it two seconds.  So the
process only gets a finder in front of `sys.meta_path`.  It finds nothing but the module `torch`, has it loaded as
always, and then registers torch's public hook for the steps of all optimizers.  That hook loads the rest of pacecar; a
process that trains nothing never does.

A rank's children (loader workers, compile workers, helpers) inherit its environment and must not be taken for the rank.
The first python that sees a rank's variables writes its process id beside them into PACECAR_RUN; another process with
the same variables is a helper.

    PACECAR_RUN   1                     set by `pacecar run` or by hand; empty or 0: nothing is done
                  4711@RANK=0           process 4711 is this rank
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, var-annotated, assignment"

import _thread
import os
import sys

__all__ = ["begin"]

VARIABLE = "PACECAR_RUN"

PLACES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_PROCID",
    "SLURM_STEP_ID",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "JOB_COMPLETION_INDEX",
)
"""Variables in which launchers describe a rank.

A launcher adds some for the ranks that it starts, so it is not taken for one of them.
"""


_has_begun = []


def begin():
    """Wait for torch, unless the environment turns pacecar off."""
    if _has_begun or os.environ.get(VARIABLE, "0") in ("", "0"):
        return
    _has_begun.append(True)  # a .pth file and PYTHONPATH may both lead here
    helper_of = claim(os.environ, os.getpid())
    if "torch" in sys.modules:
        meet(helper_of)
    else:
        sys.meta_path.insert(0, Finder(helper_of))


def claim(environ, pid):
    """Return None if this process may be a rank, else the id of the process that it is a helper of.

    Writes to the environment, which is safe only at the start, before there are threads.
    """
    place = ",".join(name + "=" + environ[name] for name in PLACES if name in environ)
    if not place:
        return None
    owner, _, owned = environ[VARIABLE].partition("@")
    if owned == place and owner != str(pid):
        return owner
    environ[VARIABLE] = str(pid) + "@" + place
    return None


def meet(helper_of):
    """Register the optimizer hook, now that torch is there."""
    try:
        from pacecar.job.autoattach.optimizer_hook import register

        register(helper_of)
    except Exception as error:  # noqa: BLE001  a python without pacecar, another torch: the script goes on
        if helper_of is None and os.environ.get("RANK", "0") == "0":
            line = "pacecar: does not attach: " + type(error).__name__ + ": " + str(error) + "\n"
            os.write(2, line.encode())


class Finder:
    """Finds nothing but torch, and only by asking the finders that would have been asked without it.

    It stays until torch is loaded: libraries ask for its spec to see whether it is installed, and load it later.
    """

    def __init__(self, helper_of):
        self.helper_of = helper_of
        self.asking = set()

    def find_spec(self, name, path=None, target=None):
        """Return torch's own spec with a loader that reports when it is done; None for every other name.

        Another finder of this kind may ask all others too, including this one: it finds nothing while it asks.
        """
        thread = _thread.get_ident()
        if name != "torch" or thread in self.asking:
            return None
        self.asking.add(thread)
        try:
            return self.find_torch(name, path, target)
        finally:
            self.asking.discard(thread)

    def find_torch(self, name, path, target):
        """Return what the others find; None without torch, which may be installed or added later."""
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = Loader(spec.loader, self)
                return spec
        return None

    def leave(self):
        """Return whether torch was loaded for the first time; there is nothing more to find then."""
        is_first = self in sys.meta_path
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        return is_first


class Loader:
    """Loads as `loader` does, and leaves no trace of itself in the module."""

    def __init__(self, loader, finder):
        self.loader = loader
        self.finder = finder

    def create_module(self, spec):
        """Create the module as the real loader does."""
        return self.loader.create_module(spec)

    def exec_module(self, module):
        """Run the module as the real loader does, then begin; a failed import may be tried again."""
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        if self.finder.leave():
            meet(self.finder.helper_of)

    def __getattr__(self, name):
        return getattr(self.loader, name)
