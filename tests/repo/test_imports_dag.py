"""Imports form a DAG, rooms keep their order, packages keep apart, and few modules name SGLang.

    working tree -> [imported] -> [import_graph] -> circles, rooms out of order, heavy imports

Late imports, inside functions, count as imports; those under TYPE_CHECKING are never run.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

from tests.repo.import_graph import (
    PACKAGE_MODULES,
    SOURCES,
    Imported,
    When,
    import_graph,
    imported,
)
from tests.repo.tree import python_files

# The modules that may import from sglang: the hook ledger's family, which the hook tests resolve
# against the installed version, and the launcher, which hands over to SGLang's own. A trailing `.`
# allows a package with all it holds. An entry that nothing needs fails.
MAY_IMPORT_SGLANG = {
    "sgl_esft_launch.",
    "sgl_elastic.front_hooks",
    "sgl_elastic.front.sglang_wire",
    "sgl_elastic.engine.",
    "sgl_elastic.instance.process",
    "sgl_esft.fields.request_classes",
    "sgl_esft.health.engine_processes",
    "sgl_esft.hook_ledger",
    "sgl_esft.lang.",
    "sgl_esft.platform.",
    "sgl_esft.plugin.lora_layers",
    "sgl_esft.plugin.register",
    "sgl_esft.plugin.runner_core",
    "sgl_esft.sglang_api",
}

# Package -> packages it must not import, at any depth of its code. Weaving knows nothing of the
# elastic runtime; the launcher knows both.
FORBIDDEN = {
    "sgl_esft": {"sgl_elastic", "bench", "tests", "scripts"},
    "sgl_elastic": {"sgl_esft_launch", "bench", "tests", "scripts"},
    "sgl_esft_launch": {"bench", "tests", "scripts"},
    "sgl_esft_kernels": {"sgl_esft", "sgl_elastic", "sglang", "bench", "tests", "scripts"},
}

# What our packages import of each other, late imports included, but for the launcher, which may
# import all. An entry that nothing needs fails. The name by which a server is started stays in
# sgl_esft; it hands over to the launcher.
HANDED_OVER = {
    "sgl_esft.launch_server": {"sgl_esft_launch.server"},
    "sgl_elastic.assembly": {"sgl_esft.lifecycle.folders"},
    "sgl_elastic.front_hooks": {"sgl_esft.hook_ledger"},
    "sgl_elastic.front.readiness": {
        "sgl_esft.health.heartbeat",
        "sgl_esft.health.engine",
        "sgl_esft.health.readiness",
    },
    "sgl_elastic.engine.hooks": {"sgl_esft.hook_ledger", "sgl_esft.lifecycle.commands"},
    "sgl_elastic.engine.loader": {
        "sgl_esft.errors",
        "sgl_esft.formats.manifest",
        "sgl_esft.formats.model_spec",
        "sgl_esft.weave.host_cache",
        "sgl_esft.weave.page_source",
        "sgl_esft.weave.plane",
    },
    "sgl_elastic.engine.memory": {
        "sgl_esft.config",
        "sgl_esft.errors",
        "sgl_esft.weave.expert_memory",
        "sgl_esft.weave.slot_layout",
    },
    "sgl_elastic.engine.plugin": {"sgl_esft.hook_ledger", "sgl_esft.observe.console"},
    "sgl_elastic.engine.rank": {"sgl_esft.lifecycle.folders", "sgl_esft.weave.plane"},
    "sgl_elastic.instance.process": {
        "sgl_esft",
        "sgl_esft.env",
        "sgl_esft.health.ending",
        "sgl_esft.ports",
    },
    "sgl_elastic.instance.spare_process": {"sgl_esft", "sgl_esft.health.ending"},
    "sgl_elastic.nodes.agent": {"sgl_esft.health.heartbeat", "sgl_esft.ports"},
    "sgl_elastic.nodes.engines": {"sgl_esft.health.heartbeat"},
    "sgl_elastic.options": {"sgl_esft.byte_size"},
}

# The rooms of a package, lowest first: a module imports its own room and those before it. A room is
# a folder, or a module of the package's root. Rooms of one line may not import each other either.
ROOMS = {
    "sgl_esft": """
        errors dashboard support
        byte_size fields hook_ledger ports
        http
        env
        observe
        config
        formats
        quant
        access lang weave
        memory platform
        sglang_api tune
        offload
        tools
        health lifecycle zoo
        plugin
        launch_server
    """,
    "sgl_elastic": """
        errors processes types workdir
        plan wire
        memory
        instance
        coordinator engine nodes
        autoscale
        front
        baselines front_hooks
        options
        assembly
        runtime
    """,
}
ROOT_MODULES = 10  # of sgl_esft, at most: what belongs together has a room

# Values in, values out: these import each other and VALUES_ONLY, so nothing they do depends on a
# clock, a process, a socket or a device.
PURE = {
    "sgl_elastic.autoscale.policy",
    "sgl_elastic.front.rank_choice",
    "sgl_elastic.autoscale.slo",
    "sgl_elastic.baselines.strategies",
    "sgl_elastic.errors",
    "sgl_elastic.instance.handover",
    "sgl_elastic.instance.rank_messages",
    "sgl_elastic.instance.standbys",
    "sgl_elastic.instance.state",
    "sgl_elastic.memory.runs",
    "sgl_elastic.memory.slots",
    "sgl_elastic.plan.",
    "sgl_elastic.types",
}
VALUES_ONLY = {
    "__future__",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "itertools",
    "json",
    "math",
    "msgspec",
    "typing",
}

# Processes that come up without the weight of these, so that a device's memory outlives engines.
LIGHT = {
    "sgl_elastic.memory.worker": {"torch", "sglang", "sgl_esft"},
    "sgl_elastic.coordinator.coordinator": {"torch", "sglang", "sgl_esft"},
}


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Some cycle as a path along the imports that ends where it began; empty: there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


def roots_imported(source: str, module: str) -> set[str]:
    """First parts of everything imported anywhere in the source, late imports included."""
    found = imported(source, module, is_package=module in PACKAGE_MODULES, when=When.NAMED)
    return {each.base.split(".")[0] for each in found}


def foreign_modules(source: str, module: str) -> set[str]:
    """Modules of our other packages that the source imports, late imports included."""
    found = imported(source, module, is_package=module in PACKAGE_MODULES, when=When.NAMED)
    names = {each.module_among(SOURCES) for each in found}
    own = {module.split(".", maxsplit=1)[0], "sgl_esft_kernels"}
    if "sgl_esft_launch" in own:
        return set()
    return {name for name in names if name in SOURCES and name.split(".")[0] not in own}


def reached_from(module: str, graph: dict[str, set[str]]) -> set[str]:
    """The module and every module of ours that is imported with it."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.add(each)
            waiting.extend(graph[each])
    return found


def roots_at_import(module: str) -> set[str]:
    """First parts of what is imported when the module is."""
    is_package = module in PACKAGE_MODULES
    found = imported(SOURCES[module], module, is_package=is_package, when=When.AT_IMPORT)
    return {each.base.split(".")[0] for each in found}


def room_of(module: str) -> str:
    """`sgl_esft.weave.plane` -> weave, `sgl_esft.env` -> env."""
    return module.split(".")[1]


def out_of_order(graph: dict[str, set[str]], rooms: dict[str, str]) -> list[str]:
    """Imports of a room that is not below the module's own; a room without a place is named."""
    floors = {
        (package, room): floor
        for package, lines in rooms.items()
        for floor, line in enumerate(lines.split("\n"))
        for room in line.split()
    }
    found = []
    for module in sorted(m for m in graph if m.split(".")[0] in rooms and "." in m):
        package, room = module.split(".")[0], room_of(module)
        if (package, room) not in floors:
            found.append(f"{module} is in no room of the order")
            continue
        others = {n for n in graph[module] if n.startswith(f"{package}.") and room_of(n) != room}
        floor = floors[package, room]
        found += [
            f"{module} imports {name}"
            for name in sorted(others)
            if floors.get((package, room_of(name)), floor) >= floor
        ]
    return found


def impure(source: str, module: str) -> set[str]:
    """What a module imports that is neither a value's nor pure."""
    found = imported(source, module, is_package=module in PACKAGE_MODULES, when=When.NAMED)
    names = {each.module_among(SOURCES) for each in found}
    return {
        name
        for name in names
        if name.split(".")[0] not in VALUES_ONLY and not any(allows(e, name) for e in PURE)
    }


def allows(entry: str, module: str) -> bool:
    return module == entry.rstrip(".") or (entry.endswith(".") and module.startswith(entry))


# The name by which a server is started, which hands over to the launcher.
SHIM = "sgl_esft.launch_server"


def test_imports_form_a_dag() -> None:
    sources = {module: source for module, source in SOURCES.items() if module != SHIM}
    assert find_cycle(import_graph(sources, PACKAGE_MODULES)) == []


def test_rooms_import_downwards() -> None:
    assert out_of_order(import_graph(SOURCES, PACKAGE_MODULES), ROOMS) == []


def test_every_room_of_the_order_is_there() -> None:
    there = {(m.split(".")[0], room_of(m)) for m in SOURCES if "." in m}
    named = {(package, room) for package, lines in ROOMS.items() for room in lines.split()}
    assert named - there == set()


def test_the_root_is_small() -> None:
    root = [path for path in python_files("sgl_esft") if path.count("/") == 1]
    assert len(root) <= ROOT_MODULES, root


def test_packages_keep_out_of_each_other() -> None:
    found = [
        f"{module} imports {root}"
        for module, source in SOURCES.items()
        for root in roots_imported(source, module) & FORBIDDEN[module.split(".")[0]]
    ]
    assert found == []


def test_weaving_and_the_elastic_runtime_meet_where_it_is_written() -> None:
    found = {m: names for m, s in SOURCES.items() if (names := foreign_modules(s, m))}
    assert found == HANDED_OVER


def test_weaving_does_not_need_the_launcher() -> None:
    graph = import_graph(SOURCES, PACKAGE_MODULES, When.AT_IMPORT)
    early = {m for m in SOURCES for n in graph[m] if n.startswith("sgl_esft_launch")}
    assert {m for m in early if m.startswith("sgl_esft.")} == set()


def test_what_decides_is_pure() -> None:
    modules = {m: s for m, s in SOURCES.items() if any(allows(entry, m) for entry in PURE)}
    assert {m: found for m, s in modules.items() if (found := impure(s, m))} == {}
    unneeded = {entry for entry in PURE if not any(allows(entry, m) for m in modules)}
    assert sorted(unneeded) == []


def test_the_wire_knows_only_the_errors() -> None:
    graph = import_graph(SOURCES, PACKAGE_MODULES, When.AT_IMPORT)
    assert graph["sgl_elastic.wire"] == {"sgl_elastic.errors"}


def test_memory_and_coordinator_are_light() -> None:
    graph = import_graph(SOURCES, PACKAGE_MODULES, When.AT_IMPORT)
    for module, heavy in LIGHT.items():
        reached = {root for each in reached_from(module, graph) for root in roots_at_import(each)}
        assert reached & heavy == set(), module


def test_ray_is_named_in_one_place_and_imported_late() -> None:
    importing = {m for m, s in SOURCES.items() if "ray" in roots_imported(s, m)}
    assert importing == {"sgl_elastic.nodes.ray_agents"}
    assert all("ray" not in roots_at_import(m) for m in importing)


def test_only_engines_import_torch() -> None:
    elastic = {m: s for m, s in SOURCES.items() if m.startswith("sgl_elastic")}
    importing = {m for m, s in elastic.items() if "torch" in roots_imported(s, m)}
    assert sorted(m for m in importing if not m.startswith("sgl_elastic.engine.")) == []


def test_only_the_hook_family_imports_sglang() -> None:
    importing = {m for m, source in SOURCES.items() if "sglang" in roots_imported(source, m)}
    strangers = {m for m in importing if not any(allows(e, m) for e in MAY_IMPORT_SGLANG)}
    assert sorted(strangers) == []
    unneeded = {e for e in MAY_IMPORT_SGLANG if not any(allows(e, m) for m in importing)}
    assert sorted(unneeded) == []


def test_checker_finds_a_cycle() -> None:
    sources = {
        "p": "",
        "p.a": "from p import b",
        "p.b": "from .c import x",
        "p.c": "import p.a",
        "p.d": "import p.a",
    }
    assert find_cycle(import_graph(sources, {"p"})) == ["p.a", "p.b", "p.c", "p.a"]


def test_checker_tells_when_an_import_is_run() -> None:
    late = "def f():\n    import p.b\n"
    typing_only = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.b\n"
    guarded = "try:\n    import p.b\nexcept ImportError:\n    pass\n"
    chosen = "if x:\n    import p.b\n"
    sources = {"late": late, "typing_only": typing_only, "guarded": guarded, "chosen": chosen}
    seen = {
        when: {
            n for n, s in sources.items() if import_graph({"p.a": s, "p.b": ""}, set(), when)["p.a"]
        }
        for when in When
    }
    assert seen[When.AT_IMPORT] == {"guarded", "chosen"}
    assert seen[When.EVER] == {"guarded", "chosen", "late"}
    assert seen[When.NAMED] == set(sources)


def test_checker_finds_a_circle_that_a_late_import_closes() -> None:
    sources = {"p": "", "p.a": "import p.b", "p.b": "def f():\n    from p import a\n"}
    assert find_cycle(import_graph(sources, {"p"})) == ["p.a", "p.b", "p.a"]


def test_checker_finds_an_import_against_the_order() -> None:
    rooms = {"p": "low\nmiddle same\nhigh"}
    graph = {
        "p": {"p.high.a"},
        "p.low.a": {"p.middle.a"},
        "p.middle.a": {"p.low.a", "p.middle.b", "q.high"},
        "p.middle.b": set(),
        "p.same": {"p.middle.b"},
        "p.high.a": {"p.low.a", "p.same"},
        "p.other": set(),
    }
    assert out_of_order(graph, rooms) == [
        "p.low.a imports p.middle.a",
        "p.other is in no room of the order",
        "p.same imports p.middle.b",
    ]


def test_checker_resolves_relative_imports() -> None:
    for is_package, base in [(False, "a.x"), (True, "a.b.x")]:
        found = imported("from .x import y", "a.b", is_package=is_package, when=When.AT_IMPORT)
        assert found == {Imported(base, "y")}


def test_checker_tells_a_submodule_from_a_name_of_its_package() -> None:
    sources = {"p": "import p.a\n", "p.a": "from p import b\n", "p.b": ""}
    assert find_cycle(import_graph(sources, {"p"})) == []
    sources["p.a"] = "from p import value\n"
    assert find_cycle(import_graph(sources, {"p"})) == ["p", "p.a", "p"]


def test_checker_sees_what_is_not_pure() -> None:
    assert impure("import math\nfrom sgl_elastic import types\n", "sgl_elastic.plan.x") == set()
    assert impure("def f():\n    import time\n", "sgl_elastic.plan.x") == {"time"}
    assert impure("from sgl_elastic import runtime\n", "sgl_elastic.plan.x") == {
        "sgl_elastic.runtime"
    }


def test_checker_follows_imports() -> None:
    graph = {"p.a": {"p.b"}, "p.b": {"p.c"}, "p.c": {"p.a"}, "p.d": {"p.a"}}
    assert reached_from("p.b", graph) == {"p.a", "p.b", "p.c"}


def test_checker_sees_imports_between_packages() -> None:
    source = "def f():\n    from sgl_esft.memory import plan\n"
    assert foreign_modules(source, "sgl_elastic.a") == {"sgl_esft.memory.plan"}
    assert foreign_modules(source, "sgl_esft.a") == set()
    assert foreign_modules(source, "sgl_esft_launch.a") == set()
