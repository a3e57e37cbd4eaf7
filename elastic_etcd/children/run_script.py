"""`python -u run_script.py train.py ...` is `python -u train.py ...` whose agent sees its steps.

Started by agent/worker.py, by its path, where workers are not forked. Standard library only.
"""

from __future__ import annotations

import sys

if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this folder: its names are not for the worker's imports

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_etcd.children import entry
else:  # beside this file; torch.compile looks in sys.modules for what it meets
    _spec = spec_from_file_location("_elastic_etcd_entry", Path(__file__).with_name("entry.py"))
    entry = sys.modules[_spec.name] = module_from_spec(_spec)
    _spec.loader.exec_module(entry)


def main(argv: list[str]) -> entry.Entry:
    """Become what the rest of the command line asks for, with its folder first in `sys.path`."""
    given = entry.Entry([sys.executable, "-u", *argv[1:]])
    if given.folder is not None:
        sys.path.insert(0, given.folder)
    given.install_as_main()
    entry.show_stacks()
    entry.mend_libraries()
    return given


if __name__ == "__main__":
    worker = main(sys.argv)
    worker.run()
