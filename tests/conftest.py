"""What holds for all tests: no test learns from another one, or from what its user trained yesterday."""

import os

os.environ.setdefault("PACECAR_TUNE_REMEMBER", "false")
