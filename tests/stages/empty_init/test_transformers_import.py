"""What transformers doesn't do as it is imported."""

import subprocess
import sys

_TAKEN_OVER = """
import builtins, sys
from offstage.stages.empty_init.transformers_import import import_models

opened = []
plain = builtins.open
builtins.open = lambda path, *args, **kwargs: (opened.append(str(path)), plain(path, *args, **kwargs))[1]
import_models()
builtins.open = plain
assert not [path for path in opened if path.endswith(".py")], opened[:3]

from transformers import models
from transformers.utils import import_utils
fresh = import_utils.define_import_structure.__wrapped__(models.__file__)
assert set(models.__all__) >= {name for modules in fresh.values() for names in modules.values() for name in names}
assert models._modules >= {name for modules in fresh.values() for name in modules}
assert models.opt.OPTConfig().model_type == "opt"
"""


def test_the_package_of_models_has_the_list_that_it_would_make_and_reads_no_source_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", _TAKEN_OVER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
