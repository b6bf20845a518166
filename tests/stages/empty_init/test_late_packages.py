"""Packages that stand-ins hold the places of: what imports them, and what is true then."""

import subprocess
import sys

import pytest

_BEGIN = """
import sys, torch, transformers
from offstage.stages.empty_init.late_packages import is_imported, postpone_imports
postpone_imports()
assert not is_imported("torch._dynamo") and not is_imported("scipy.optimize")
"""
_REHEARSED = """
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.transformers_import import import_models
import_models()
config = transformers.LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                                  vocab_size=32)
with torch.device("meta"):
    skeleton = describe(transformers.LlamaForCausalLM(config).eval())
assert skeleton.unrehearsed is None and skeleton.moments and skeleton.caches
assert not is_imported("torch._dynamo") and not is_imported("scipy.optimize")
"""
_COMPILED = """
def marked(value):
    return value + 1
assert torch._dynamo.allow_in_graph(marked) is marked
@torch.compiler.disable
def disabled(value):
    return torch.compiler.is_compiling()
assert disabled.__name__ == "disabled" and not disabled(1)
assert not is_imported("torch._dynamo")
stands_in = sys.modules["torch._dynamo"]
graphs = []
def backend(graph, _):
    graphs.append(graph)
    return graph.forward
compiled = torch.compile(lambda value: (marked(value) * 2, disabled(value)), backend=backend)
answer, was_compiled = compiled(torch.ones(2))
assert answer.tolist() == [4.0, 4.0] and not was_compiled
assert any(node.target is marked for graph in graphs for node in graph.graph.nodes)
assert is_imported("torch._dynamo") and sys.modules["torch._dynamo"] is stands_in is torch._dynamo
import torch._dynamo.source
assert torch._dynamo.source.ConstantSource.__module__ == "torch._dynamo.source"
"""
_SUBMODULE = """
from torch._dynamo.eval_frame import skip_code
import torch._dynamo.eval_frame as found
assert is_imported("torch._dynamo") and found is torch._dynamo.eval_frame and found.skip_code is skip_code
assert found.__spec__.loader is found.__loader__
"""
_SOURCE = """
from torch._dynamo.source import AttrSource
assert is_imported("torch._dynamo") and AttrSource is torch._dynamo.source.AttrSource
"""
_IN_A_REHEARSAL = """
from torch._subclasses.fake_tensor import FakeTensorMode
with torch.device("meta"), FakeTensorMode(allow_non_fake_inputs=True):
    torch._dynamo.utils
tensors = [value for name, module in list(sys.modules.items()) if name.startswith("torch.")
           for value in list(vars(module).values()) if isinstance(value, torch.Tensor)]
assert is_imported("torch._dynamo") and not any(tensor.is_meta for tensor in tensors)
assert torch.compile(lambda value: value * 2, backend="eager")(torch.ones(1)).tolist() == [2.0]
"""
_SOLVED = """
from scipy.optimize import linear_sum_assignment
assert not is_imported("scipy.optimize")
assert [side.tolist() for side in linear_sum_assignment([[1, 0], [0, 1]])] == [[0, 1], [1, 0]]
assert is_imported("scipy.optimize")
from scipy.optimize import linear_sum_assignment, minimize
assert linear_sum_assignment.__module__ != "offstage.stages.empty_init.late_packages" and callable(minimize)
"""
_MISSING = """
import torch._dynamo
try:
    torch._dynamo.no_such_name
except AttributeError as error:
    assert "torch._dynamo" in str(error) and "no_such_name" in str(error)
else:
    raise AssertionError
assert is_imported("torch._dynamo")
"""


@pytest.mark.parametrize("code", [_REHEARSED, _COMPILED, _SUBMODULE, _SOURCE, _IN_A_REHEARSAL, _SOLVED, _MISSING])
def test_a_package_is_imported_once_something_of_it_is_used_and_is_then_as_ever(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", _BEGIN + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
