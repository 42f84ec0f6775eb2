"""Writes the API page from docstrings. With `--check` it reports if the page is out of date, and exits with 1."""

from __future__ import annotations

import argparse
import ast
import doctest
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "python" / "blockyard" / "_core.pyi"
PAGE = ROOT / "docs" / "reference" / "api.md"
WIDTH = 120

# The modules that users import, in page order, with their purpose.
MODULES = {
    "blockyard": "What most programs need.",
    "blockyard.cache": "Manager, engine, store and executor in one; needs torch.",
    "blockyard.types": "Results and facets, for annotations.",
    "blockyard.layout": "Where the bytes of a block lie in an engine's tensors.",
    "blockyard.engine": "Copies between device, host and staging rows; needs torch.",
    "blockyard.engine.ops": "The copies as torch ops: also `torch.ops.blockyard.swap_blocks` and so on.",
    "blockyard.executor": "Executes decisions with an engine and a store; needs torch.",
    "blockyard.prefix_store": "A prefix cache in an external store, as `cache.prefix_store`; needs torch.",
    "blockyard.stores": "External storage.",
    "blockyard.scheduler": "The reference scheduler.",
    "blockyard.traces": "Traces of requests: [recorded](../operate/recording.md) and read.",
    "blockyard.offload": "A host cache below an engine's own block manager.",
    "blockyard.allocators": "For engines that keep their own block tables, or their own allocator.",
    "blockyard.events": "Events of the prefix cache.",
    "blockyard.errors": "Errors.",
    "blockyard.integrations.transformers": "Hugging Face models served from a paged cache.",
    "blockyard.metrics": "Prometheus metrics; needs prometheus-client.",
    "blockyard.tracing": "OpenTelemetry spans; needs opentelemetry-api.",
    "blockyard.testing": "Models and simulated memory for your own tests: [test-kit.md](test-kit.md).",
    "blockyard.testing.machines": "Hypothesis state machines; needs hypothesis.",
    "blockyard.testing.machines.strategies": "Hypothesis strategies; needs hypothesis.",
    "blockyard.testing.store_suite": "Test suites of external stores; need pytest.",
    "blockyard.testing.faults": "Damage to a store, and stores that fail.",
}
# Modules that engines call through their own interfaces, as explained in the engine's documentation. They are read from
# the source, since most of these engines are not installed here.
ADAPTERS = {
    "blockyard.integrations.prompt_lookup": "Draft tokens for `Generator(num_lookahead_tokens=)`.",
    "blockyard.integrations.transformers.continuous": "[Below transformers' own batching](../engines/transformers.md).",
    "blockyard.integrations.vllm": "[Loaded by vLLM by name](../engines/vllm.md).",
    "blockyard.integrations.sglang": "[Loaded by SGLang's HiCache by name](../engines/sglang.md).",
    "blockyard.integrations.sglang.linker": "[Loaded by SGLang's unified cache by name](../engines/sglang.md).",
    "blockyard.integrations.lmcache": "[Loaded by LMCache by name](../engines/lmcache.md).",
    "blockyard.integrations.nano": "[In place of the block manager of nano-vllm and the like](../engines/nano.md).",
    "blockyard.integrations.vllm_v0": "[In place of the block manager of vLLM 0.7.3](../engines/vllm_v0.md).",
    "blockyard.integrations.router_events": "Events over ZMQ for prefix routers, in vLLM's format.",
    "blockyard.integrations.gaudi": "[Defragmentation next to another allocator](../engines/gaudi.md); needs torch.",
}
HEAD = """# API

`make docs` writes this page from the code: every public name once, with its signature, what its docstring says first,
and an example. `help(name)` shows the rest: shapes, dtypes, errors.
"""
FIELD = re.compile(r"^    (\w+): (.*(?:\n     .*)*)", re.MULTILINE)


def api_page() -> str:
    """Return the page of all public names."""
    parts = [HEAD]
    seen: dict[str, object] = {}
    for module, purpose in MODULES.items():
        parts.append(f"\n## `{module}`\n\n{purpose}\n")
        names = [name for name in import_module(module).__all__ if name != "__version__"]
        again = [name for name in names if seen.get(name) is getattr(import_module(module), name)]
        parts += [f"\nAlso {' and '.join(f'`{name}`' for name in again)}, above.\n"] if again else []
        for name in names:
            if name not in again:
                target = seen[name] = getattr(import_module(module), name)
                parts.append("\n" + (entry(name, target) if is_defined(target) else constant_entry(module, name)))
    for module, purpose in ADAPTERS.items():
        parts.append(f"\n## `{module}`\n\n{purpose}\n")
        for name in public_names(module):
            parts.append("\n" + source_entry(module, name, f"{module.split('.')[-1]}." if name in seen else ""))
            seen[name] = None
    return "".join(parts)


def is_defined(target: object) -> bool:
    """Return whether it has its own docstring: a class or function, not a constant or a type alias."""
    return inspect.isclass(target) or inspect.isroutine(target)


def public_names(module: str) -> list[str]:
    """Return a module's `__all__` without importing it."""
    for node in parsed(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise SystemExit(f"{module} has no __all__")


def source_entry(module: str, name: str, prefix: str = "") -> str:
    """Return the page's entry for a name of a module that is not imported; `prefix` distinguishes equal names."""
    node = defined(module, name)
    if not isinstance(node, ast.ClassDef | ast.FunctionDef):
        return constant_entry(module, name, prefix)
    functions = [member for member in node.body if isinstance(member, ast.FunctionDef)]
    called = node if isinstance(node, ast.FunctionDef) else None
    if isinstance(node, ast.ClassDef):
        called = next((member for member in functions if member.name in {"__init__", "__new__"}), None)
    text = ast.get_docstring(node) or ""
    call = "" if called is None else source_arguments(called)
    lines = [*titled(f"{prefix}{name}", f"{prefix}{name}{call}"), opening(text)]
    members = dict(fields_of(text))
    if isinstance(node, ast.ClassDef):
        for member in functions:
            if not member.name.startswith("_") and (said := opening(ast.get_docstring(member) or "")):
                decorators = {ast.unparse(decorator).split(".")[-1] for decorator in member.decorator_list}
                is_called = not decorators & {"property", "cached_property", "setter"}
                members.setdefault(member.name + (source_arguments(member) if is_called else ""), said)
    return assembled(lines, members, text)


def constant_entry(module: str, name: str, prefix: str = "") -> str:
    """Return the page's entry for a constant or a type alias: its value, and the string below it."""
    value, text = assigned(module, name)
    shown = f" = {value}" if len(value) <= WIDTH - 20 and "\n" not in value else ""
    return "\n".join([*titled(f"{prefix}{name}", f"{prefix}{name}{shown}"), text]).rstrip() + "\n"


def assigned(module: str, name: str) -> tuple[str, str]:
    """Find the value of a module's constant, and the string below it."""
    body = parsed(module).body
    for node, below in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.ImportFrom) and node.module and name in [alias.name for alias in node.names]:
            return assigned(node.module, name)
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and target and ast.unparse(target) == name:
            said = below.value if isinstance(below, ast.Expr) else None
            text = said.value if isinstance(said, ast.Constant) else ""
            return ast.unparse(node.value), opening(inspect.cleandoc(str(text)))
    raise SystemExit(f"{module}.{name} is assigned nowhere")


def source_arguments(function: ast.FunctionDef) -> str:
    """Return the arguments of a function with their brackets."""
    return f"({plain_arguments(function.args)})"


def plain_arguments(arguments: ast.arguments) -> str:
    """Return the arguments of a function without annotations and `self`."""
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    if arguments.args and arguments.args[0].arg in {"self", "cls"}:
        del arguments.args[0]
    return ast.unparse(arguments)


def defined(module: str, name: str) -> ast.stmt | None:
    """Find the statement that defines a name, also in the module that it is imported from."""
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return defined(node.module, alias.name)
    return None


def parsed(module: str) -> ast.Module:
    """Parse the source, or the stub, of one of our modules."""
    path = ROOT.joinpath("python", *module.split("."))
    files = (path / "__init__.py", path.with_suffix(".pyi"), path.with_suffix(".py"))
    return ast.parse(next(file for file in files if file.exists()).read_text(encoding="utf-8"))


def entry(name: str, target: object) -> str:
    """Return the page's entry for one name."""
    lines = [*titled(name, heading(name, target)), summary(target)]
    members: dict[str, str] = {}
    if inspect.isclass(target) and not issubclass(target, BaseException):
        own = dict(members_of(target))
        members = described_fields(target)
        members |= {heading(member, value): summary(value) for member, value in own.items() if member not in members}
        bases = [base for base in target.__mro__[1:] if base in listed_classes()]
        if any(member not in own for base in bases for member, _ in members_of(base)):
            lines[-1] += f" Has the members of `{bases[0].__name__}`, too."
    return assembled(lines, members, docstring(target))


def titled(name: str, call: str) -> list[str]:
    """Return the title of an entry, and below it how the name is called."""
    signature = [] if call == name else ["```text", *folded(call), "```", ""]
    return [f"### `{name}`", "", *signature]


def folded(call: str) -> list[str]:
    """Break a call that is too long for a line of the page, behind commas."""
    return wrap(call, 88, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def assembled(lines: list[str], members: dict[str, str], doc: str) -> str:
    """Return an entry: its head, its members, and the example of its docstring."""
    # The members of an interface are those of the class that it names.
    plain = [f"`{member}`" for member, text in members.items() if not text]
    lines += ["", f"Members: {', '.join(plain)}."] if plain else []
    lines += [""] * (len(members) > len(plain)) + [f"- `{member}`: {text}" for member, text in members.items() if text]
    code = example(doc)
    lines += ["", "```python", *code, "```"] if code else []
    return "\n".join(lines).rstrip() + "\n"


def example(doc: str) -> list[str]:
    """Return the example of a docstring as code, with what it prints as comments."""
    lines: list[str] = []
    for step in doctest.DocTestParser().get_examples(doc):
        lines += step.source.splitlines()
        lines += [f"# {line}".rstrip() for line in step.want.splitlines()]
    return lines


def described_fields(target: type) -> dict[str, str]:
    """Return the attributes that a class's docstring describes."""
    is_record = hasattr(target, "__dataclass_fields__") or hasattr(target, "_fields")
    found = dict(fields_of(docstring(target), ("Attributes", "Args") if is_record else ("Attributes",)))
    return {name: text for name, text in found.items() if not name.startswith("_")}


def fields_of(doc: str, sections: tuple[str, ...] = ("Attributes",)) -> Iterator[tuple[str, str]]:
    """Yield the names described by sections of a docstring, with their descriptions."""
    for section in sections:
        for part in re.findall(rf"^{section}:\n((?:(?: .*)?\n?)*)", doc, re.MULTILINE):
            for name, text in FIELD.findall(part):
                joined = re.sub(r"\s+", " ", text).strip()
                yield name, joined[0].upper() + joined[1:]


@cache
def listed_classes() -> frozenset[type]:
    """Return the classes that the page lists."""
    found = (getattr(import_module(module), name) for module in MODULES for name in import_module(module).__all__)
    return frozenset(value for value in found if inspect.isclass(value))


def members_of(target: type) -> Iterator[tuple[str, object]]:
    """Yield the public members that a class defines, or inherits from our classes that the page does not list."""
    seen: set[str] = set()
    for owner in target.__mro__:
        if owner.__module__.partition(".")[0] != "blockyard" or (owner is not target and owner in listed_classes()):
            continue
        # A core class has its members in arbitrary order; use the stub's order.
        order = stub_members().get(owner.__name__, []) if owner.__module__ == "blockyard._core" else []
        members = sorted(vars(owner).items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
        for name, value in members:
            described = inspect.isroutine(value) or isinstance(value, property | staticmethod | classmethod)
            described |= type(value).__name__ in {"getset_descriptor", "member_descriptor", "cached_property"}
            is_hidden = name.startswith(("_", "test_"))  # the names of tests are sentences
            is_hidden |= any(mark.startswith("hypothesis_stateful_") for mark in getattr(value, "__dict__", ()))
            if is_hidden or name in seen or not (described or type(value) is target):
                continue
            seen.add(name)
            yield name, value


@cache
def stub_members() -> dict[str, list[str]]:
    """Return the names that each class of the stub defines, in their order."""
    classes = [node for node in ast.parse(STUB.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    return {node.name: [member.name for member in node.body if isinstance(member, ast.FunctionDef)] for node in classes}


def heading(name: str, target: object) -> str:
    """Return a name with its signature, if it is called."""
    called = target.__func__ if isinstance(target, staticmethod | classmethod) else target
    if isinstance(target, property) or inspect.isdatadescriptor(target) or not callable(called):
        return name
    # Not constructed by users: an exported class without a constructor, and an interface.
    if inspect.isclass(target) and (getattr(target, "_is_protocol", False) or has_no_constructor(target)):
        return name
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return name
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name not in {"self", "cls"}
    ]
    text = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    text = re.sub(r"<[^>]*>|Ellipsis", "...", text).replace("(/, ", "(").replace("(/)", "()")
    return name + re.sub(r"b'((?:\\x00)+)'", lambda zeros: f"bytes({len(zeros[1]) // 4})", text)


def has_no_constructor(target: type) -> bool:
    """Return whether only the core creates objects of a core class."""
    return target.__module__ == "blockyard._core" and target.__text_signature__ is None


def summary(target: object) -> str:
    """Return the first paragraph of a docstring."""
    return opening(docstring(target))


def opening(text: str) -> str:
    """Return the first paragraph of a text as one line."""
    return text.partition("\n\n")[0].replace("\n", " ").strip()


def docstring(target: object) -> str:
    """Return the docstring of a class, function or descriptor, without indentation."""
    described = target.__func__ if isinstance(target, staticmethod | classmethod) else target
    return inspect.cleandoc(getattr(described, "__doc__", None) or "")


def main() -> int:
    """Write, or check, the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    text = api_page()
    stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text
    if check and stale:
        sys.stderr.write(f"out of date, run `make docs`: {PAGE.relative_to(ROOT)}\n")
    elif stale:
        PAGE.write_text(text, encoding="utf-8")
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
