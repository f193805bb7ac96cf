"""Doors open one way: every import of ours is allowed by the table of rooms, walked through the syntax trees."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Room -> rooms it may import directly. Who may enter a room may enter the rooms behind it. Open to all: types, config
# and the command lines over it.
DOORS = {
    "types": (),
    "config": (),
    "config_flags": (),
    "params": (),
    "sharding": ("params",),
    "ops": (),
    "model": ("ops", "params", "sharding"),
    "weights": ("params", "sharding"),
    "llm": (),
    "verify": (),
    "agent": (),
    "data": ("agent", "llm"),
    "train": ("model", "data", "weights"),
    "envs": ("agent", "verify", "llm", "data"),
    "serve": ("model", "agent", "data", "weights"),
    "rollout": ("agent", "envs", "serve"),
    "rl": ("train", "rollout", "serve"),
    "forge": ("envs", "rollout"),
}
OPEN = {"types", "config", "config_flags"}
# Rooms that run where there is no accelerator stack; data/loader.py may use grain, and neither may reach jax itself.
WITHOUT_JAX = ("types", "config", "config_flags", "agent", "data", "llm", "verify")
JAX_STACK = {"jax", "jaxlib", "flax", "optax", "orbax"}


def behind(room: str) -> set[str]:
    """The room itself and every room whose door it may pass, directly or through others."""
    seen, todo = {room}, [room]
    while todo:
        for other in DOORS[todo.pop()]:
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return seen | OPEN


def imports(path: Path) -> set[str]:
    """Dotted names of every module that a file imports, wherever the statement stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the room"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def rooms_imported(path: Path) -> set[str]:
    return {
        name.split(".")[1] for name in imports(path) if name.startswith("mage_jax.") and name.split(".")[1] in DOORS
    }


def library_files() -> list[Path]:
    return sorted((ROOT / "mage_jax").rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "mage_jax").with_suffix("").parts[0]


def test_every_file_belongs_to_a_room():
    strangers = {room_of(p) for p in library_files()} - set(DOORS) - {"__init__"}
    assert not strangers, f"add these rooms to the table, with their doors: {strangers}"


def test_the_table_has_no_back_edge():
    for room in DOORS:
        for other in behind(room) - {room} - OPEN:
            assert room not in behind(other), f"{room} and {other} import each other"


@pytest.mark.parametrize("room", sorted(DOORS))
def test_room_imports_only_through_its_doors(room):
    allowed = behind(room)
    for path in library_files():
        if room_of(path) == room:
            wrong = rooms_imported(path) - allowed
            assert not wrong, f"{path.relative_to(ROOT)} may not import {wrong}; allowed: {sorted(allowed)}"


def test_a_back_edge_would_be_seen(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("def f():\n    from mage_jax.train import loop\n")
    assert rooms_imported(path) - behind("model") == {"train"}


def test_configs_are_data():
    for path in sorted((ROOT / "configs").glob("*.py")):
        ours = {name for name in imports(path) if name.split(".")[0] in ("mage_jax", "launch", "convert", "eval")}
        assert all(name.startswith("mage_jax.config") for name in ours), f"{path.name} imports {ours}"


@pytest.mark.parametrize("top", ["convert", "eval", "launch"])
def test_commands_do_not_import_tests(top):
    for path in sorted((ROOT / top).rglob("*.py")):
        assert not [n for n in imports(path) if n.split(".")[0] == "tests"], path


def test_host_rooms_do_not_import_jax():
    for path in library_files():
        if room_of(path) in WITHOUT_JAX:
            assert not {name.split(".")[0] for name in imports(path)} & JAX_STACK, path


def test_no_torch_and_no_remote_code_outside_the_benches():
    for top in ("mage_jax", "configs", "convert", "launch", "eval"):
        for path in sorted((ROOT / top).rglob("*.py")):
            assert not {n.split(".")[0] for n in imports(path)} & {"torch", "transformers", "pickle"}, path


def test_files_stay_short():
    for top in ("mage_jax", "configs", "convert", "launch", "eval", "tests"):
        for path in sorted((ROOT / top).rglob("*.py")):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            assert lines <= 420, f"{path.relative_to(ROOT)} has {lines} lines: is there a second idea in it?"
