"""The rules of the house that a machine can check: layers, forbidden imports, sizes, docstrings, frozen names."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import hiercomm
import hiercomm.torch
from hiercomm.config import options_table

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hiercomm"


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8"), path.name) for name, path in FILES.items()}

# The first part of a module's name below hiercomm; "" is hiercomm/__init__.py.
LAYERS = (
    {"topology", "config", "errors", "launcher", "reduction", "devices", "oracle", "kernels"},
    {"comm", "compress", "progress", "bucket", "timing", "native", "kernel_arguments", "kernel_cache"},
    {
        "allreduce",
        "coded",
        "exchange",
        "factored",
        "negotiate",
        "probe",
        "control",
        "connect",
        "eager",
        "reducer",
        "links",
        "stalls",
        "watch",
        "rounds",
        "shard",
        "replica",
        "ledger",
    },
    {"modes"},
    {"torch", "runtime", ""},
    {"cli"},
)


def layer(module: str) -> int:
    """The layer of a module, from 1. Raises AssertionError where nobody has given it one."""
    head = [*module.split("."), ""][1]
    found = [number for number, heads in enumerate(LAYERS, start=1) if head in heads]
    assert found, f"{module} is in no layer: give it one here and in DESIGN.md"
    return found[0]


def imports(module: str) -> set[str]:
    """Every module that `module` imports, anywhere in it; a relative import counts as '.'."""
    found = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found |= {f"{base}.{alias.name}" for alias in node.names}
    # `from a.b import c` may name a module or something in one.
    return {
        name if name in FILES or name.rpartition(".")[0] not in FILES else name.rpartition(".")[0] for name in found
    }


def own_imports(module: str) -> set[str]:
    """The modules of hiercomm among `imports`."""
    return {name for name in imports(module) if name.split(".")[0] == "hiercomm"} - {module}


@pytest.mark.parametrize("module", FILES)
def test_imports_go_down_the_layers(module):
    assert not {name for name in imports(module) if name.startswith(".")}, "relative import"
    upward = {name for name in own_imports(module) if layer(name) > layer(module)}
    assert not upward, f"{module} (layer {layer(module)}) imports {upward}"


def test_no_import_cycles():
    graphlib.TopologicalSorter({module: own_imports(module) for module in FILES}).prepare()


def test_transports_and_modes_do_not_know_each_other():
    for module in FILES:
        others = own_imports(module)
        if module.startswith("hiercomm.comm."):
            assert not {o for o in others if o.startswith("hiercomm.comm")} - {
                "hiercomm.comm.base",
                "hiercomm.comm.staging",
            }, module
            assert not {o for o in others if o.startswith("hiercomm.compress")}, module
        if module.startswith("hiercomm.compress"):
            assert not {o for o in others if o.startswith("hiercomm.comm.")}, module
        if module.startswith("hiercomm.modes"):
            assert not {o for o in others if o.startswith("hiercomm.comm")}, f"{module} imports a transport"
        if module.startswith("hiercomm.modes."):
            assert not {o for o in others if o.startswith("hiercomm.modes")} - {"hiercomm.modes.base"}, module


@pytest.mark.parametrize(
    ("forbidden", "owner"),
    [
        ("mpi4py", "hiercomm.comm.mpi"),
        ("torch.distributed", "hiercomm.comm.torchdist"),
        ("cupy", "hiercomm.native"),
        ("ctypes", "hiercomm.native"),
    ],
)
def test_one_module_alone_imports(forbidden, owner):
    users = {m for m in FILES if any(f"{name}.".startswith(f"{forbidden}.") for name in imports(m))}
    # The benchmarks run beside torch.distributed itself.
    assert users - {"hiercomm.cli.peers"} <= {owner}


def test_config_alone_reads_the_environment():
    readers = re.compile(r"\bos\.(environb?|getenvb?|putenv|unsetenv)\b")
    users = {m for m, tree in TREES.items() if readers.search(ast.unparse(tree)) and "os" in imports(m)}
    users |= {m for m in FILES if imports(m) & {"os.environ", "os.getenv", "os.environb", "os.putenv"}}
    # ast.unparse keeps docstrings, so a module that merely speaks of os.environ has to be reworded.
    assert users == {"hiercomm.config"}


# ---- sizes and names ----------------------------------------------------------------------------------


@pytest.mark.parametrize("module", FILES)
def test_modules_are_short_and_named_for_what_they_do(module):
    assert len(FILES[module].read_text(encoding="utf-8").splitlines()) < 400
    assert FILES[module].stem not in ("utils", "util", "helpers", "common", "core", "manager")


def test_functions_are_short():
    """Under 40 lines from the first statement behind the docstring to the last."""
    long = {}
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
                lines = (body[-1].end_lineno or 0) - body[0].lineno + 1
                if lines >= 40:
                    long[f"{module}.{node.name}"] = lines
    assert not long


# ---- docstrings and classes ---------------------------------------------------------------------------

_Function = ast.FunctionDef | ast.AsyncFunctionDef
CLASSES = {
    f"{module}.{node.name}": node
    for module, tree in TREES.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef)
}


def methods(name: str) -> dict[str, _Function]:
    """The methods that a class itself defines."""
    return {n.name: n for n in CLASSES[name].body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}


def ancestors(name: str) -> Iterator[str]:
    """The classes of hiercomm above a class, nearest first."""
    module = name.rpartition(".")[0]
    for base in CLASSES[name].bases:
        short = ast.unparse(base).split("[")[0].rpartition(".")[2]
        for candidate in (f"{m}.{short}" for m in (module, *sorted(own_imports(module)))):
            if candidate in CLASSES:
                yield candidate
                yield from ancestors(candidate)
                break


def is_public(node: ast.ClassDef | _Function) -> bool:
    return not node.name.startswith("_")


def is_abstract(function: _Function) -> bool:
    return any(ast.unparse(d).rpartition(".")[2] == "abstractmethod" for d in function.decorator_list)


@pytest.mark.parametrize("module", FILES)
def test_everything_public_says_what_it_is(module):
    """Modules, functions, classes and methods; a method may rely on the docstring of the one it overrides."""
    tree = TREES[module]
    silent = [] if ast.get_docstring(tree) else [module]
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and is_public(node):
            silent += [] if ast.get_docstring(node) else [node.name]
        if isinstance(node, ast.ClassDef) and is_public(node):
            own = f"{module}.{node.name}"
            inherited = {n for a in ancestors(own) for n, f in methods(a).items() if ast.get_docstring(f)}
            for name, function in methods(own).items():
                if is_public(function) and name not in inherited and not ast.get_docstring(function):
                    silent.append(f"{node.name}.{name}")
    assert not silent


def test_no_concrete_method_is_overridden():
    """Classes are abstract or final. Work.wait is the documented exception; special methods are not meant."""
    overridden = [
        f"{name}.{method} overrides {ancestor}.{method}"
        for name in CLASSES
        for method in methods(name)
        for ancestor in ancestors(name)
        if not method.startswith("__")
        and method in methods(ancestor)
        and not is_abstract(methods(ancestor)[method])
        and (ancestor, method) != ("hiercomm.comm.base.Work", "wait")
    ]
    assert not overridden


def test_final_classes_have_no_subclasses():
    for name in CLASSES:
        for ancestor in ancestors(name):
            decorators = {ast.unparse(d) for d in CLASSES[ancestor].decorator_list}
            assert "final" not in decorators, f"{name} derives from the final {ancestor}"


# ---- the public surface -------------------------------------------------------------------------------


def test_names_of_hiercomm_are_frozen():
    assert hiercomm.__all__ == [
        "ASSGD", "BF16", "BSP", "FP8", "FP16", "Compressor", "Config", "ErrorFeedback", "Int4", "Int8", "Mode",
        "NoCompression", "PerLayer", "PowerSGD", "RandomK", "Sign", "TopK", "init", "is_initialized", "shutdown",
    ]  # fmt: skip
    assert all(hasattr(hiercomm, name) for name in hiercomm.__all__)


def test_names_of_hiercomm_torch_are_frozen():
    assert hiercomm.torch.__all__ == [
        "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "Max", "Min",
        "ProcessSet", "Product", "Sum", "SyncBatchNorm", "allgather", "allgather_async", "allgather_object",
        "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "barrier", "broadcast", "broadcast_",
        "broadcast_async", "broadcast_async_", "broadcast_object", "broadcast_optimizer_state",
        "broadcast_parameters", "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "device", "elastic",
        "flush", "global_process_set", "gloo_built", "gloo_enabled", "init", "is_homogeneous", "is_initialized",
        "local_rank", "local_size", "merge_optimizer_states", "mpi_built", "mpi_enabled", "mpi_threads_supported",
        "nccl_built", "poll", "rank", "rocm_built", "shutdown", "size", "synchronize", "topology",
    ]  # fmt: skip
    assert all(hasattr(hiercomm.torch, name) for name in hiercomm.torch.__all__)


# What `import horovod.torch as hvd` (0.28.1) exports, without its submodules.
HOROVOD = (
    "Adasum Average Compression DistributedOptimizer HorovodInternalError Max Min ProcessSet Product Sum SyncBatchNorm "
    "add_process_set allgather allgather_async allgather_object allreduce allreduce_ allreduce_async allreduce_async_ "
    "alltoall alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_ broadcast_object "
    "broadcast_optimizer_state broadcast_parameters ccl_built cross_rank cross_size cuda_built ddl_built elastic "
    "global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce "
    "grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter "
    "grouped_reducescatter_async init is_initialized join local_rank local_size mpi_built mpi_enabled "
    "mpi_threads_supported nccl_built poll rank reducescatter reducescatter_async remove_process_set rocm_built "
    "shutdown size sparse_allreduce_async start_timeline stop_timeline synchronize"
)


@pytest.mark.parametrize("name", HOROVOD.split())
def test_horovod_has_no_name_that_hiercomm_lacks(name):
    assert hasattr(hiercomm.torch, name)


def test_op_constants_have_horovods_numbers():
    hvd = hiercomm.torch
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == [0, 1, 2, 3, 4, 5]


# ---- the repository -----------------------------------------------------------------------------------


def test_readme_has_the_table_of_options():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert options_table() in readme, "paste the output of hiercomm.config.options_table() into README.md"


@pytest.mark.parametrize("script", sorted(ROOT.glob("scripts/slurm/*.sbatch")), ids=lambda path: path.name)
def test_batch_files_are_bash(script):
    subprocess.run(["bash", "-n", script], check=True)


def test_no_path_of_a_developers_machine():
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    folders = re.compile(rb"(?<![\w.$}-])/(work|root)/")
    found = [
        f"{name}:{number}"
        for name in listing.stdout.decode().split("\0")
        if name and (ROOT / name).is_file()
        for number, line in enumerate((ROOT / name).read_bytes().splitlines(), start=1)
        if folders.search(line)
    ]
    assert not found
