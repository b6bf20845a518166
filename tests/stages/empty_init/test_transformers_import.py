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


_ASSIGNED_LATER = """
import sys
from offstage.stages.empty_init.transformers_import import import_losses

import_losses()
assert "scipy.optimize" not in sys.modules

import numpy, transformers
from transformers.loss import loss_deformable_detr, loss_for_object_detection
from transformers.loss.loss_utils import LOSS_MAPPING
assert transformers.utils.is_scipy_available() and loss_for_object_detection.is_scipy_available()
assert LOSS_MAPPING["ForObjectDetection"] is loss_for_object_detection.ForObjectDetectionLoss
rows, columns = loss_deformable_detr.linear_sum_assignment(numpy.eye(2))
assert (rows.tolist(), columns.tolist()) == ([0, 1], [1, 0])
assert "scipy.optimize" in sys.modules
"""


def test_the_package_of_models_has_the_list_that_it_would_make_and_reads_no_source_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", _TAKEN_OVER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_losses_have_scipys_function_and_import_it_as_it_is_called() -> None:
    pytest.importorskip("scipy")
    done = subprocess.run([sys.executable, "-c", _ASSIGNED_LATER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
