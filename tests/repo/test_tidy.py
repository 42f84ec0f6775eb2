"""Rules of the source tree that no other tool holds: lengths, ASCII, open ends, test partners, named paths."""

import ast
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from absolute_links import absolute_links

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)]+)\)")
FOLDERS = ("python", "buildsystem", "rust", "cuda", "tests", "benches", "examples", "docs", ".ci")
CODE = {".py", ".pyi", ".rs", ".cu", ".cpp", ".h", ".sh"}
TEXT = CODE | {".md", ".toml"}
LONGEST_FILE = 900
LONGEST_FUNCTION = 70

# Spelt so that this file does not find itself.
OPEN_END = re.compile(r"\b(TO[D]O|FIX[M]E|XX[X]|HA[C]K)\b(?!.*#\d)")
RUST_FUNCTION = re.compile(r"^(\s*)(?:pub(?:\([^)]*\))? )?(?:(?:const|async|unsafe|extern \"C\") )*fn (\w+)")
NO_FUNCTION = ("namespace", "extern", "struct", "class", "enum", "union", "#", "//")


def tree(suffixes: set[str]) -> list[Path]:
    nested = (path for name in FOLDERS for path in (ROOT / name).rglob("*"))
    return sorted(
        path
        for path in (*ROOT.glob("*"), *nested)
        if path.suffix in suffixes and path.is_file() and not {"target", "_build"} & set(path.relative_to(ROOT).parts)
    )


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def statements(path: Path) -> Iterator[ast.AST]:
    """The nodes of a module but its expressions, which are most."""
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    for node in nodes:
        yield node
        nodes += [inner for inner in ast.iter_child_nodes(node) if not isinstance(inner, ast.expr)]


def python_functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in statements(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def rust_functions(path: Path) -> Iterator[tuple[str, int]]:
    # rustfmt has laid the files out: a function ends with a brace at its own indentation.
    text = lines(path)
    for start, line in enumerate(text):
        if not (match := RUST_FUNCTION.match(line)) or line.endswith(("}", ";")):
            continue
        indent, function = match.groups()
        for end in range(start + 1, len(text)):
            is_declaration = text[end].startswith(f"{indent})") and text[end].endswith(";")
            if text[end].startswith(f"{indent}}}") or is_declaration:
                yield function, end - start + 1
                break


def cpp_functions(path: Path) -> Iterator[tuple[str, int]]:
    # clang-format does not indent namespaces: what opens and closes in the first column is a function.
    start = None
    for number, line in enumerate(lines(path)):
        if line.endswith("{") and not line.startswith((" ", "}", *NO_FUNCTION)):
            start = number
        elif line.startswith("}") and start is not None:
            yield lines(path)[start], number - start + 1
            start = None


FUNCTIONS = {".py": python_functions, ".rs": rust_functions, ".cu": cpp_functions, ".cpp": cpp_functions}


def test_no_file_is_too_long():
    # A stub is one file, as its module is. Docstrings of the API do not make a file of the binding longer.
    def length(path: Path) -> int:
        is_binding = path.is_relative_to(ROOT / "rust" / "binding")
        return sum(not (is_binding and line.lstrip().startswith("///")) for line in lines(path))

    too_long = [f"{name(path)}: {length(path)}" for path in tree(CODE - {".pyi"}) if length(path) > LONGEST_FILE]
    assert not too_long


def test_no_function_is_too_long():
    too_long = [
        f"{name(path)}: {function}: {length}"
        for path in tree(set(FUNCTIONS))
        for function, length in FUNCTIONS[path.suffix](path)
        if length > LONGEST_FUNCTION
    ]
    assert not too_long


def class_names(sources: list[Path]) -> dict[str, list[str]]:
    """Where each class is defined, by its name without underscores."""
    found: dict[str, list[str]] = {}
    for path in sources:
        for node in statements(path):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.strip("_"), []).append(f"{path}:{node.lineno}")
    return found


def test_a_class_name_means_one_class():
    sources = [path for path in tree({".py"}) if path.relative_to(ROOT).parts[0] in {"python", "buildsystem"}]
    assert not {name: places for name, places in class_names(sources).items() if len(places) > 1}


def test_classes_of_one_name_are_found(tmp_path: Path):
    (tmp_path / "a.py").write_text("class _Job:\n    class Part: ...\n")
    (tmp_path / "b.py").write_text("def f():\n    class Job: ...\n")
    found = class_names([tmp_path / "a.py", tmp_path / "b.py"])
    assert found == {"Job": [f"{tmp_path / 'a.py'}:1", f"{tmp_path / 'b.py'}:2"], "Part": [f"{tmp_path / 'a.py'}:2"]}


SAMPLES = {
    ".py": ("def long(\n    x: int,\n) -> int:\n", "    x += 1\n", "    return x\n"),
    ".rs": (
        "impl A {\n    pub(crate) const fn long(\n        x: u32,\n    ) -> u32 {\n",
        "        f();\n",
        "    }\n}\n",
    ),
    ".cpp": ("namespace a {\n\nint long_one(int x) {\n", "    ++x;\n", "}\n\n}  // namespace a\n"),
}


@pytest.mark.parametrize(("suffix", "length"), [(".py", 74), (".rs", 74), (".cpp", 72)])
def test_the_length_of_a_function_is_measured(tmp_path: Path, suffix: str, length: int):
    head, line, tail = SAMPLES[suffix]
    path = tmp_path / f"sample{suffix}"
    path.write_text(head + line * LONGEST_FUNCTION + tail)
    assert [found for _, found in FUNCTIONS[suffix](path)] == [length]


def test_sources_are_ascii():
    assert not [name(path) for path in tree(TEXT) if not path.read_bytes().isascii()]


def test_open_ends_name_an_issue():
    found = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in tree(TEXT)
        for number, line in enumerate(lines(path), 1)
        if OPEN_END.search(line)
    ]
    assert not found


@pytest.mark.parametrize("crate", ["copy", "core", "store"])
def test_each_rust_file_has_tests(crate: str):
    source = ROOT / "rust" / crate / "src"
    tested = {path.stem for path in (ROOT / "rust" / crate / "tests").glob("*.rs")}
    untested = []
    for path in sorted(source.rglob("*.rs")):
        # A file of a folder module is tested with the module, there or in a file of its name; a file without functions
        # has only types.
        folders = [folder for folder in path.parents if source in folder.parents]
        heads = [folder / "mod.rs" for folder in folders]
        texts = [file.read_text(encoding="utf-8") for file in [path, *heads] if file.exists()]
        modules = {path.stem, *(folder.name for folder in folders)}
        if "fn " in texts[0] and not any("#[cfg(test)]" in text for text in texts) and not modules & tested:
            untested.append(name(path))
    assert not untested


RUST_USE = re.compile(r"^(?:pub(?:\([^)]*\))? )?use ((?:crate|super|self)::[^;]+);", re.MULTILINE)


def used_paths(tree: str) -> Iterator[list[str]]:
    """The paths that `a::{b, c::{d, e}}` stands for."""
    head, brace, rest = tree.partition("{")
    prefix = [part for part in head.strip().split("::") if part]
    if not brace:
        yield prefix[:-1] + prefix[-1].split()[:1] if prefix else prefix
        return
    depth, item = 0, ""
    for char in rest[: rest.rindex("}")] + ",":
        depth += (char == "{") - (char == "}")
        if char == "," and not depth:
            yield from ([*prefix, *path] for path in used_paths(item) if item.strip())
            item = ""
        else:
            item += char


def rust_imports(source: Path) -> dict[str, set[str]]:
    """Which other modules each module of a crate imports. A folder's `mod.rs` and its files may know each other."""
    files = {}
    for path in source.rglob("*.rs"):
        parts = path.relative_to(source).with_suffix("").parts
        files["::".join(parts[:-1] if parts[-1] in {"lib", "mod"} else parts)] = path
    imports: dict[str, set[str]] = {module: set() for module in files}
    for module, path in files.items():
        here = module.split("::") if module else []
        text = path.read_text(encoding="utf-8").split("#[cfg(test)]\nmod tests")[0]
        for tree in RUST_USE.findall(text):
            for used in used_paths(tree):
                at = [] if used[0] == "crate" else list(here)
                for part in used[1:] if used[0] in {"crate", "self"} else used:
                    at = at[:-1] if part == "super" else [*at, part]
                while at and "::".join(at) not in files:
                    at = at[:-1]
                target = "::".join(at)
                family = not target or target == module or f"{module}::".startswith(f"{target}::")
                if not family and not f"{target}::".startswith(f"{module}::"):
                    imports[module].add(target)
    return imports


def circles(imports: dict[str, set[str]]) -> set[frozenset[str]]:
    """Sets of modules that all import one another, directly or not."""
    reach = {}
    for module in imports:
        found, rest = set(), [module]
        while rest:
            new = imports[rest.pop()] - found
            found |= new
            rest.extend(new)
        reach[module] = found
    both = {module: frozenset(m for m in found if module in reach[m]) for module, found in reach.items()}
    return {modules | {module} for module, modules in both.items() if modules}


@pytest.mark.parametrize("crate", ["binding", "copy", "core", "redis", "store"])
def test_no_rust_modules_import_one_another_in_a_circle(crate: str):
    assert not circles(rust_imports(ROOT / "rust" / crate / "src"))


def test_circles_of_imports_are_found(tmp_path: Path):
    (tmp_path / "b").mkdir()
    texts = {
        "lib": "use crate::a::A;\n",
        "a": "use crate::{b::{c::C, D}, e::E as F};\n",
        "b/mod": "pub use self::c::C;\nuse crate::e::E;\n",
        "b/c": "use super::D;\nuse crate::e;\n",
        "e": "pub(crate) use crate::f::{\n    F,\n};\n",
        "f": "fn f() {}\n",
    }
    for module, text in texts.items():
        (tmp_path / f"{module}.rs").write_text(text)
    imports = rust_imports(tmp_path)
    assert imports["a"] == {"b", "b::c", "e"}
    assert not circles(imports)
    (tmp_path / "f.rs").write_text("use super::a;\n#[cfg(test)]\nmod tests {\nuse crate::b;\n}\n")
    assert circles(rust_imports(tmp_path)) == {frozenset({"a", "b", "b::c", "e", "f"}) - {"b"} | {"b"}}


def python_imports(folder: Path) -> dict[str, set[str]]:
    """Which other modules each module of a folder imports: anywhere in it, also for annotations alone."""
    parts = {path: path.relative_to(folder).with_suffix("").parts for path in folder.rglob("*.py")}
    files = {".".join(names[:-1] if names[-1] == "__init__" else names): path for path, names in parts.items()}
    imports: dict[str, set[str]] = {}
    for module, path in files.items():
        nodes = list(statements(path))
        named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= (inner & files.keys()) or {node.module}
        imports[module] = (named & files.keys()) - {module}
    return imports


def test_no_python_modules_know_one_another_in_a_circle():
    # lint-imports, which also holds the layers, does not count imports for annotations.
    assert not circles(python_imports(ROOT / "python"))


def test_circles_of_annotations_are_found(tmp_path: Path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "__init__.py").write_text("from p.a import A\n")
    (tmp_path / "p" / "a.py").write_text("if TYPE_CHECKING:\n    from p import b\n")
    (tmp_path / "p" / "b.py").write_text("def f():\n    from p.a import A\n")
    assert circles(python_imports(tmp_path)) == {frozenset({"p.a", "p.b"})}


def test_folders_are_small_and_modules_have_one_style():
    sources = [*(ROOT / "rust").glob("*/src/**/*.rs"), *(ROOT / "python").rglob("*.py")]
    counts = Counter(path.parent for path in sources)
    assert not {name(folder): count for folder, count in counts.items() if count > 13}
    assert not [name(path) for path in sources if path.suffix == ".rs" and path.with_suffix("").is_dir()]


def test_each_binding_file_has_a_class_or_a_partner_in_a_crate():
    concepts = {path.stem for path in (ROOT / "rust").glob("*/src/**/*.rs") if "binding" not in path.parts}
    concepts |= {path.name for path in (ROOT / "rust").glob("*/src/**/*") if path.is_dir()}
    concepts |= {path.name for path in (ROOT / "rust").iterdir()}
    source = ROOT / "rust" / "binding" / "src"
    files = [path for path in source.rglob("*.rs") if "#[pyclass(" not in path.read_text()]
    # These convert arguments, are locks, hold the lock that facets share, or warn.
    plain = {"lib", "locks", "mod", "open_tickets", "shared"}
    apart = {path.stem for path in files if path.parent.name != "convert"}
    assert not sorted(apart - concepts - plain)


# What reads, writes or makes memory of numpy's. Much of it is safe to call and wrong: an array can have changed since
# it was checked, `as_slice` takes Fortran order too, two arrays can have one memory, a new array panics without memory.
OF_NUMPY = re.compile(
    r"unsafe(?!_code)|\.as_slice(_mut)?\(\)\?|\.as_array(_mut)?\(|(read(only|write))\(|PyReadonlyArray|PyReadwriteArray"
    r"|PyArray\w*(::<[^>]*>)?::(zeros|from_|arange|new)|into_pyarray|to_pyarray"
)


def test_one_module_of_the_binding_touches_memory_of_the_caller():
    source = ROOT / "rust" / "binding" / "src"
    assert "#![deny(unsafe_code)]" in lines(source / "lib.rs")
    others = [path for path in source.rglob("*.rs") if path.name != "memory.rs"]
    found = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in others
        for number, line in enumerate(lines(path), 1)
        if OF_NUMPY.search(line)
    ]
    assert not found
    excepted = [name(path) for path in others for line in lines(path) if "(unsafe_code" in line and "deny" not in line]
    assert excepted == ["rust/binding/src/convert/mod.rs"]


def test_two_crates_alone_have_unsafe_code():
    crates = {path.parent for path in ROOT.glob("rust/*/Cargo.toml")}
    safe = {crate for crate in crates if "#![forbid(unsafe_code)]" in lines(crate / "src" / "lib.rs")}
    assert {crate.name for crate in crates - safe} == {"binding", "copy"}


@pytest.mark.parametrize(
    "line",
    ["let rows = array.as_slice()?;", "array.readonly()", "PyArray2::<u8>::zeros(py, n, false)", "unsafe { f() }"],
)
def test_memory_of_the_caller_is_recognised(line: str):
    assert OF_NUMPY.search(line)


def test_the_binding_reads_sequences_in_one_way():
    # What else PyO3 has for them believes their lengths, and takes memory for as many items.
    believing = re.compile(r"extract::<(Option<)?(Vec|BTreeMap|HashMap|HashSet)\b")
    found = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "rust" / "binding" / "src").rglob("*.rs"))
        for number, line in enumerate(lines(path), 1)
        if path.name != "args.rs" and believing.search(line)
    ]
    assert not found


def test_each_python_module_has_a_test_file():
    # The test kit's modules are tests themselves; it is tested as one, by the tests that are built on it.
    tested = {path.stem.removeprefix("test_") for path in (ROOT / "tests").rglob("test_*.py")} | {"testing"}
    untested = [
        name(path)
        for path in sorted((ROOT / "python" / "blockyard").rglob("*.py"))
        if not path.stem.startswith("__")
        and not {path.stem, path.parent.name} & tested
        # A module that only gathers names has nothing of its own to test.
        and any(line.startswith(("def ", "class ", "async def ")) for line in lines(path))
    ]
    assert not untested


FIELD = re.compile(r"    [\w*`., ]+(?: \(.*?\))?:(?: |$)")
ITEM = re.compile(r" *(?:[-*]|\d+\.) +")


def broken_fields(docstring: str) -> list[str]:
    """Lines of a docstring's sections that neither begin a field nor are indented below one."""
    found, is_section = [], False
    for line in docstring.splitlines():
        if line and not line.startswith(" "):
            is_section = line in {"Args:", "Attributes:", "Raises:"}
        elif is_section and re.match(r"    \S", line) and not FIELD.match(line):
            found.append(line.strip())
    return found


def broken_items(document: str) -> list[str]:
    """Lines of a list's items that are not indented below them."""
    found, is_code, is_item = [], False, False
    for line in document.splitlines():
        is_code ^= line.lstrip().startswith("```")
        if ITEM.match(line):
            is_item = True
        elif not line or line.startswith(("#", "|", ">", "`", "**")):
            is_item = False
        elif is_item and not is_code and not line.startswith(" "):
            found.append(line)
    return found


def test_fields_of_docstrings_and_items_of_lists_keep_their_indents():
    broken = {}
    for path in tree({".py", ".pyi"}):
        for node in statements(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                broken[path, node] = broken_fields(ast.get_docstring(node) or "")
    for path in tree({".md"}):
        broken[path, None] = broken_items(path.read_text(encoding="utf-8"))
    assert not [f"{name(path)}: {line}" for (path, _), lines in broken.items() for line in lines]


def test_lost_indents_are_found():
    assert broken_fields("A.\n\nArgs:\n    a: what\n    it is.\n    *b: (`c`)\n        more.\n\nNot: this") == [
        "it is."
    ]
    assert broken_items("Text.\n- one\n  more\nlost\n\nText\nmore.\n1. a\nb\n```\n- c\nd\n```\n") == ["lost", "b"]


# Where a document's paths start.
BASES = (ROOT, ROOT / "rust", ROOT / "rust" / "core" / "src", ROOT / "python" / "blockyard")


def found(path: str) -> Path | None:
    return next((base / path for base in BASES if (base / path).exists()), None)


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "docs/concepts/architecture.md"])
def test_documents_name_only_paths_that_exist(document: str):
    quoted = re.findall(r"`([^`\s:]+)(?:::[\w.]+)?`", (ROOT / document).read_text(encoding="utf-8"))
    paths = [path for path in quoted if "/" in path or Path(path).suffix in TEXT]
    assert paths
    assert not [path for path in paths if not found(path)]


def test_architecture_names_only_functions_that_exist():
    document = ROOT / "docs" / "concepts" / "architecture.md"
    named = re.findall(r"`([^`\s:]+)::([\w.]+)`", document.read_text(encoding="utf-8"))
    assert named
    missing = []
    for path, dotted in named:
        source = found(path)
        text = source.read_text(encoding="utf-8") if source else ""
        # A method is named with its class in Python; Rust's own are found by their name alone.
        wanted = [rf"\b(?:def|class|fn|struct|enum|trait) {part}\b" for part in dotted.split(".")]
        if not all(re.search(pattern, text) for pattern in wanted):
            missing.append(f"{path}::{dotted}")
    assert not missing


def test_decision_records_are_short_and_in_the_usual_form():
    for record in (ROOT / "docs" / "decisions").glob("[0-9]*.md"):
        text = record.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 30, name(record)
        assert max(map(len, text.splitlines())) <= 120, name(record)
        assert all(f"**{part}" in text for part in ("Context", "Decision", "Consequences")), name(record)


def test_the_readme_links_to_files_by_relative_paths():
    links = LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert links
    assert not [link for link in links if not (ROOT / link.partition("#")[0]).exists()]


def test_the_readme_of_a_release_links_to_its_files_on_github():
    text = absolute_links((ROOT / "README.md").read_text(encoding="utf-8"), "someone/fork", "v0.1.0")
    links = LINK.findall(text)
    assert "https://github.com/someone/fork/blob/v0.1.0/docs/tutorials/quickstart.md" in links
    assert "https://raw.githubusercontent.com/someone/fork/v0.1.0/docs/images/tiers.svg" in links
    assert not [link for link in links if not link.startswith("https://")]


def test_make_targets_named_in_documents_exist():
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        named = set(re.findall(r"`make ([a-z][a-z-]*)", document.read_text(encoding="utf-8")))
        assert named <= targets, f"{name(document)} names {sorted(named - targets)}"


def test_git_holds_text_and_pictures_only():
    """What a run leaves behind, such as a store's file, is not committed by chance."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run([git, "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name and not name.endswith(".png")]
    assert not [file for file in files if file.is_file() and b"\0" in file.read_bytes()]
