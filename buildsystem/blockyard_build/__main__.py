"""`python -m blockyard_build`: writes stub and op library, for a maturin that builds the wheel without this backend."""

import os
from pathlib import Path

from blockyard_build.oplibrary import build_op_library
from blockyard_build.stub import write_stub

write_stub(Path())
build_op_library(Path(), os.environ)
