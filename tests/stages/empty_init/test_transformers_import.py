"""What transformers doesn't do as it is imported."""

import subprocess
import sys

import pytest

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


_WITHOUT_OPTIMIZERS = """
import sys
from offstage.stages.empty_init.transformers_import import import_models

import_models()
from transformers.models.opt import modeling_opt
assert "scipy.optimize" not in sys.modules

import torch
from transformers.loss.loss_for_object_detection import linear_sum_assignment
rows, columns = linear_sum_assignment(torch.tensor([[4.0, 1.0], [2.0, 8.0]]), maximize=False)
assert (list(rows), list(columns)) == ([0, 1], [1, 0])
from scipy.optimize import minimize
"""


def test_the_package_of_models_has_the_list_that_it_would_make_and_reads_no_source_for_it() -> None:
    run(_TAKEN_OVER)


@pytest.mark.long_form
def test_scipys_optimizers_are_imported_as_a_loss_calls_one() -> None:
    pytest.importorskip("scipy")
    run(_WITHOUT_OPTIMIZERS)


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
