"""The pages: the files that they name exist, their links lead somewhere, and their commands are run or say why not."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import click
import pytest

from areal.cli.main import cli

REPOSITORY = Path(__file__).parents[1]
PAGES = sorted((REPOSITORY / "docs").rglob("*.md"))
GENERATED = REPOSITORY / "docs" / "reference"
TEXTS = [
    *PAGES,
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted(REPOSITORY.glob("examples/**/README.md")),
]


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """Of each block of commands: the comment before it, "" for none; its language; its text."""
    for found in re.finditer(
        r"(?:^<!-- ((?:runs|not run): [^\n]*) -->\n)?^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S
    ):
        if found[2] in ("sh", "bash", "shell", "console") or found[3].startswith("$ "):
            yield found[1] or "", found[2], found[3]


def commands(language: str, text: str) -> list[str]:
    """The command lines of a block, without prompts, continuations joined, and one's input up to END with it."""
    lines, found = iter(text.replace("\\\n", " ").splitlines()), []
    for line in lines:
        if line.startswith("$ ") or language != "console":
            file = [*takewhile("END".__ne__, lines), "END"] if line.endswith("<<END") else []
            found.append("\n".join([line.removeprefix("$ "), *file]))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_links_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_architecture_names_existing_files() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"\bareal/[\w/]+(?:\.py)?", text))
    assert len(named) > 40
    assert sorted(name for name in named if not (REPOSITORY / name).exists()) == []


def test_architecture_names_existing_classes() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    sources = "".join(file.read_text() for file in (REPOSITORY / "areal").rglob("*.py"))
    names = {name for name in re.findall(r"`([A-Z]\w+)`", text) if not name.endswith("Job")}
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", sources)) == []


@pytest.mark.parametrize(
    ("task", "file", "definition"),
    [
        ("what a session remembers of each call", "areal/services/inference/recorder/records.py", "class ModelCall"),
        ("what a session remembers of itself", "areal/services/inference/recorder/session.py", "class SessionRecord"),
        ("a field of TrainJob", "areal/resources/job_spec.py", "class TrainJobSpec"),
        ("the default of a sampling parameter", "areal/wire/sampling.py", "class SamplingParams"),
        ("the wording of a drift", "areal/reconcilers/planning.py", "Drift("),
        ("the wording of a drift", "areal/reconcilers/kinds/replica_plan.py", "Drift("),
        ("when a data proxy refuses a weight update", "areal/services/inference/data_proxy/weights.py", "WeightRoutes"),
        ("a tool-call format", "areal/wire/parsers.py", "_TOOL_CALLS"),
        ("a tool-call format", "areal/services/inference/data_proxy/parsers/registry.py", "TOOL_FORMATS = ("),
        ("which calls count as repetitions", "areal/services/inference/recorder/changes.py", "def reward_once"),
        ("the deadline of a weight update's calls", "areal/services/weight_update/updating.py", "_TRANSFER_S ="),
        ("which failed episodes are repeated", "areal/rollout/episodes.py", "_RETRYABLE ="),
        ("the names and files of checkpoints", "areal/training/checkpoints.py", "_FOLDER_NAME ="),
        ("how a job of Slurm or Ray is read", "areal/runtime/backends/slurm_job.py", "def parse_squeue"),
        ("how `--set` is parsed", "areal/resources/render.py", "_FORM = re.compile"),
        ("an alert", "areal/wire/training_health.py", "def warnings_of"),
        ("a column of `areal get`", "areal/cli/objects.py", "def columns_for"),
        ("a field of another kind", "areal/cli/apply.py", "FLAG_FIELDS = {"),
        ("a flag of an engine that users must not set", "areal/resources/backend.py", "_RESERVED_FLAGS: "),
        ("an operation of plans", "areal/reconcilers/plan.py", "class Verb("),
        ("an operation of plans", "areal/reconcilers/execute.py", "_EFFECTS: "),
        ("when an object is Ready", "areal/reconcilers/observe.py", "def routed_health"),
        ("when a process that ends is started again", "areal/runtime/shim/policy.py", "class RestartBudget"),
        ("a finding of `areal doctor`", "areal/runtime/runs.py", "def record_problems"),
        ("a function or an operator of expressions", "areal/resources/operations.py", "FUNCTIONS: "),
        ("an output format", "areal/cli/output.py", "def dump"),
    ],
)
def test_architecture_names_file_to_change(task: str, file: str, definition: str) -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {task}")]
    assert file in row and definition in (REPOSITORY / file).read_text()


# What runs the blocks of a page as they are.
RUNNERS = (
    "tests/e2e/test_pages.py",
    "tests/e2e/test_quickstart.py",
    "tests/test_release.py",
    "tests/engines/test_runbook.py",
    "tests/examples/test_gallery.py",
    "tests/examples/test_training.py",
    ".ci/run",
)


@pytest.mark.parametrize(
    "page", [page for page in TEXTS if page.parent != GENERATED], ids=lambda page: page.parent.name + "/" + page.name
)
def test_every_command_block_names_its_runner(page: Path) -> None:
    unmarked = [text for mark, _, text in blocks(page) if not mark]
    assert unmarked == [], "put <!-- runs: TEST FILE --> or <!-- not run: REASON --> before it"
    for mark, _, _ in blocks(page):
        paths = re.findall(r"(?:tests|\.ci)/[\w/.]*\w", mark)
        assert [path for path in paths if not (REPOSITORY / path).exists()] == []
        if mark.startswith("runs: "):
            runner = mark.removeprefix("runs: ")
            assert runner in RUNNERS and page.name in (REPOSITORY / runner).read_text(), "the file that reads the block"


def words_of_areal(line: str) -> Iterator[list[str]]:
    """The arguments of each `areal` of a shell line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if re.fullmatch(r"[;&|()<>]+", word):
            if words[:1] == ["areal"] and "..." not in words:
                yield words[1:]
            words = []
        elif words or not re.match(r"\w+=", word):
            words.append(word)


def lines_of_areal(page: Path, runner: str) -> list[list[str]]:
    """The arguments of each `areal` in the blocks of ``page`` that ``runner`` runs."""
    found = [(lang, text) for mark, lang, text in blocks(page) if mark == f"runs: {runner}"]
    return [words for lang, text in found for line in commands(lang, text) for words in words_of_areal(line)]


def parse(command: click.Command, words: list[str], parent: click.Context | None = None) -> None:
    """Raise click.UsageError for a command, an option or an argument that is not there; carry out nothing."""
    name = command.name or "areal"
    if not isinstance(command, click.Group):
        command.make_context(name, words, parent, resilient_parsing=False)
        return
    context = command.make_context(name, words, parent)
    _, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    assert found is not None
    parse(found, rest, context)


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.parent.name + "/" + page.name)
def test_every_areal_command_on_page_parses(page: Path) -> None:
    refused = []
    for _, language, text in blocks(page):
        for line in commands(language, text):
            for words in words_of_areal(re.sub(r"\$\(cat [^)]*\)", "x", line)):
                try:
                    parse(cli, words)
                except click.exceptions.Exit:
                    pass
                except click.ClickException as error:
                    if "does not exist" not in error.format_message():  # a file of the reader's
                        refused.append(f"{line}: {error.format_message()}")
    assert refused == []
