import sys
from pathlib import Path

# The made-up models of the package's tests.
sys.path.insert(0, str(Path(__file__).parents[2] / "python" / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

from fakes import vllm  # noqa: E402, F401
