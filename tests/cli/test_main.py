"""From words to an exit status: usage, errors, interrupts, pipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal.cli import main as entry
from areal.cli.options import Invocation
from areal.errors import ArealError, Conflict, Locked, NoCapacity, NotFound, Partial, TargetFailed, TimedOut
from areal.resources.nodes import Diagnostic, ManifestError, Pos
from tests.cli.conftest import Areal, Spawner


def test_version_flag_and_verb_agree(areal: Areal) -> None:
    assert areal("--version").out == areal("version").out


def test_unknown_command_suggests_the_near_one(areal: Areal) -> None:
    result = areal("aply")
    assert result.code == 2
    assert 'no such command "aply" (did you mean "apply"?)' in result.err
    assert '"plan" (did you mean "diff -f FILE"?)' in areal("plan").err
    assert "hint: areal --help" in result.err


def test_unknown_subcommand_suggests_from_its_group(areal: Areal) -> None:
    result = areal("inf", "registr")
    assert result.code == 2
    assert '(did you mean "register"?)' in result.err


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("rollout", "restart", "model/x"), '(did you mean "restart"?)'),
        (("rollout", "undo", "model/x"), '(did you mean "rollback"?)'),
        (("rollout", "status", "model/x"), '(did you mean "wait --for ready"?)'),
        (("exec", "-it", "model/x", "--", "bash"), '(did you mean "get processes"?)'),
        (("port-forward", "model/x", "80"), '(did you mean "get -o wide"?)'),
        (("replace", "-f", "x.yaml"), '(did you mean "apply -f FILE --replace"?)'),
        (("help", "get"), '(did you mean "--help"?)'),
        (("get", "all", "-A"), "hint: there are no namespaces"),
        (("get", "pods"), "hint: areal get processes"),
        (("get", "events"), "hint: areal events"),
        (("get", "model", "--no-headers"), "hint: -o name"),
        (("get", "model", "--field-selector", "a=b"), "hint: -l for labels"),
        (("apply", "-f", "x.yaml", "--server-side"), "hint: leave it out: fields have owners"),
        (("apply", "-f", "x.yaml", "--validate=false"), "hint: leave it out: manifests are always checked"),
        (("delete", "model/x", "--wait=false"), "unless --no-wait is given"),
        (("delete", "model/x", "--force"), "--grace 0 kills at once"),
        (("apply", "-f", "x.yaml", "--grace-period", "5"), "hint: areal delete --grace TIME"),
        (("scale", "inf/x", "--replicas", "2", "--dry-run"), "hint: areal diff -f FILE prints the plan"),
    ],
)
def test_kubectl_commands_are_answered_with_their_equivalent(areal: Areal, words: tuple[str, ...], answer: str) -> None:
    result = areal(*words)
    assert result.code in (2, 4) and result.out == ""
    assert answer in result.err


@pytest.mark.parametrize(
    "words",
    [
        ("delete", "-f", "", "--yes"),
        ("apply", "-k", "", "--yes"),
        ("apply", "-f", "x.yaml", "--profile", "", "--dry-run"),
        ("inf", "stop", "--service", "", "--yes"),
        ("delete", "--all", "--yes", "--home", ""),
        ("--home", "", "delete", "--all", "--yes"),
        ("get", "--gateway", ""),
        ("reconcile", ""),
    ],
)
def test_empty_name_or_path_does_not_mean_the_default(areal: Areal, words: tuple[str, ...]) -> None:
    result = areal(*words)
    assert result.code == 2
    assert "it is empty; is a variable of the shell not set?" in result.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("get", "--jsn"), "--json"),
        (("wait", "job/x", "--for", "condition=Complete"), "Stalled, each =True, =False or =Unknown; a job's success:"),
        (("wait", "model/x", "--for", "condition=Ready=yes"), 'no condition "Ready=yes"'),
        (("apply",), "neither -f nor -k"),
        (("diff",), "neither -f nor -k"),
        (("get", "-o", "jsn"), 'did you mean "json"'),
        (("get", "-o", "json", "--json", "-o", "yaml"), "different formats"),
        (("wait", "model/x"), "--for"),
        (("wait", "model/x", "--for", "reday"), 'did you mean "ready"'),
        (("scale", "model/x"), "--replicas"),
        (("scale", "model/x", "--replicas", "-1"), "-1"),
        (("delete",), "name the objects"),
        (("apply", "-f", "x.yaml", "--prune"), "--set-name"),
        (("apply", "-f", "x.yaml", "--timeout", "soon"), "is not a duration"),
        (("inf", "chat", "-m", "hello", "--timeout", "0"), "no time at all"),
        (("agent", "chat", "-m", "hello", "--timeout", "0s"), "no time at all"),
        (("weight-update", "force-sync", "--pair", "actor", "--timeout", "0"), "no time at all"),
        (("reconcile", "--watch", "--interval", "0"), "no time at all"),
        (("inf", "status", "--watch", "--interval", "0ms"), "no time at all"),
        (("inf", "stop", "--force", "--grace", "1s"), "exclude each other"),
        (("agent", "stop", "--force", "--grace", "1s"), "exclude each other"),
        (("train", "stop", "x", "--force", "--grace", "0"), "exclude each other"),
        (("get", "--watch", "-o", "manifest"), "has no status"),
        (("get", "processes", "-l", "a=b"), "--selector cannot be used with processes"),
        (("get", "kinds", "--show-defaults"), "--show-defaults cannot be used with kinds"),
        (("delete", "model/x", "--set", "spec.a=b", "--yes"), "--set cannot be used without -f or -k"),
        (("delete", "--all", "--profile", "dev", "--yes"), "--profile cannot be used without -f or -k"),
        (("diff", "--drift", "-f", "x.yaml"), "-f cannot be used with --drift"),
        (("diff", "--drift", "--set", "spec.a=b", "--prune"), "--set, --prune cannot be used with --drift"),
        (("apply", "p.json", "-f", "x.yaml"), "-f cannot be used with a saved plan"),
        (("apply", "p.json", "--set", "a.b=c", "--replace"), "--set, --replace cannot be used with a saved plan"),
        (("apply", "p.json", "--dry-run"), "--dry-run prints the plan of manifests, and PLAN is a plan"),
        (("apply", "x.yaml", "--set", "a.b=c"), "x.yaml is not a saved plan"),
        (("generate", "systemd", "-R"), "-R cannot be used without -f or -k"),
        (("train", "estimate", "c.yaml", "--values", "v.yaml"), "--values cannot be used without -f or -k"),
        (("top", "--interval", "5s"), "--interval cannot be used without --watch"),
        (("inf", "status", "--interval", "5s"), "--interval cannot be used without --watch"),
        (("train", "status", "x", "--interval", "5s"), "--interval cannot be used without --watch"),
        (("reconcile", "--interval", "5s"), "--interval cannot be used without --watch"),
        (("reconcile", "--stop-at-exit"), "--stop-at-exit cannot be used without --watch"),
        (("reconcile", "model/x", "--watch", "--stop-at-exit"), "cannot be used with KIND/NAME"),
        (("train", "watch", "--once", "--interval", "1"), "--once looks once"),
        (("apply", "-f", "x.yaml", "--allow-empty"), "--allow-empty cannot be used without --prune"),
        (("diff", "-f", "x.yaml", "--allow-empty"), "--allow-empty cannot be used without --prune"),
        (("apply", "-k", "x", "-R"), "-R cannot be used without -f"),
        (
            ("diff", "-f", "x.yaml", "--format", "github", "-o", "json"),
            "--format github and -o json exclude each other",
        ),
        (("generate", "docker", "-f", "x.yaml", "--force"), "--force cannot be used without --out"),
        (("convert", __file__, "--from", "verl", "--force"), "--force cannot be used without --out"),
        (("init", "model", "--force"), "--force replaces files"),
        (("init", "example", "--list", "--force"), "--force replaces files"),
        (("get", "kinds", "-w", "--sort-by", "age"), "--watch, --sort-by cannot be used with kinds"),
        (("get", "model/x", "--show-origin", "-l", "a=b"), "--selector cannot be used with --show-origin"),
        (("inf", "stop", "--all", "--service", "x", "--yes"), "--all stops every service"),
        (("agent", "stop", "--all", "--service", "x", "--yes"), "--all stops every service"),
        (("get", "-w=true"), "-w"),
        (("get", "model", "x/y"), "mixes"),
        (("describe", "model"), "a name is missing"),
        (("describe", "model/../x"), "is not a name"),
        (("inf", "scaleup", "--model", "x", "--by", "1", "--replicas", "2"), "use either"),
        (("inf", "run", "a", "--service", "b"), "give one of them"),
        (("inf", "run", "--backend", "embedded"), "needs --model NAME"),
        (("inf", "register", "--model", "x"), "--backend is missing"),
        (("inf", "register", "--model", "x", "--api-url", "http://h", "--backend", "vllm"), "cannot be used with"),
        (("completion", "tcsh"), "tcsh"),
        (("get", "-l", "a in b"), "selector"),
        (("get", "--sort-by", "nmae"), 'did you mean "name"'),
        (("get", "-o", "jsonpath={.a"), "unclosed"),
        (("config", "set", "outptu", "json"), 'did you mean "output"'),
        (("adopt", "--url", "http://h"), "--as"),
        (("adopt", "--as", "model/x"), "--pid and --url"),
    ],
)
def test_wrong_usage_exits_2_with_reason(areal: Areal, words: tuple[str, ...], message: str) -> None:
    result = areal(*words)
    assert result.code == 2
    assert message in result.err
    assert result.out == ""
    assert "Traceback" not in result.err


def test_short_option_takes_its_value_after_equals_sign(areal: Areal, tmp_path: Path) -> None:
    (tmp_path / "a=b.yaml").write_text(
        "apiVersion: areal.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: default, labels: {tier: prod}}\n"
    )
    assert areal("validate", f"-f={tmp_path}/a=b.yaml", "-o=name").code == 0
    assert areal("apply", f"-f={tmp_path}/a=b.yaml", "--set", "spec.suspend=true").code == 0
    assert areal("get", "inf", "-l=tier=prod", "-o=name").out == "inferenceservice/default\n"
    assert areal("get", "inf", "-l=tier=test", "-oname").out == ""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("get", "modle"), 4),
        (("get", "model/none"), 4),
        (("describe", "model/none"), 4),
        (("logs", "model/none"), 4),
        (("history", "model/none"), 4),
        (("wait", "model/none", "--for", "ready"), 4),
        (("delete", "model/none", "--yes"), 4),
        (("scale", "model/none", "--replicas", "1"), 4),
        (("inf", "stop"), 4),
        (("inf", "status"), 4),
        (("inf", "chat", "-m", "hello"), 4),
        (("inf", "register", "--model", "x", "--api-url", "http://127.0.0.1:1"), 4),
        (("config", "use-context", "none"), 4),
        (("get", "--context", "none"), 4),
    ],
)
def test_missing_object_exits_4_with_hint(areal: Areal, words: tuple[str, ...], code: int) -> None:
    result = areal(*words)
    assert result.code == code, result.err
    assert result.err.startswith("error: ")
    assert "hint: " in result.err


@pytest.mark.parametrize("verb", ["delete"])
def test_destructive_verb_without_terminal_needs_yes(areal: Areal, verb: str) -> None:
    result = areal(verb, "model/x")
    assert result.code == 2
    assert "--yes" in result.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ArealError("x"), 1),
        (ManifestError([Diagnostic(Pos("a.yaml", 3, 5), "spec.x", "unknown field")]), 3),
        (NotFound("x"), 4),
        (Conflict("x"), 5),
        (Locked("x"), 6),
        (TimedOut("x"), 7),
        (TargetFailed("x"), 8),
        (Partial("x"), 9),
        (NoCapacity("x"), 10),
        (ZeroDivisionError("x"), 1),
    ],
)
def test_every_kind_of_error_has_its_exit_status(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    from areal.cli.failures import report

    assert report(error, Invocation()) == code
    assert "Traceback" not in capsys.readouterr().err


def test_manifest_errors_are_listed_by_position(areal: Areal, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("apiVersion: areal.dev/v1alpha1\nkind: Model\nmetadata: {name: x}\nspec: {pth: 1, replicas: no}\n")
    result = areal("validate", "-f", str(file))
    assert result.code == 3
    lines = result.err.splitlines()
    assert lines[0].startswith(f"{file}:4:")
    assert any("pth" in line for line in lines)
    assert any("replicas" in line for line in lines)
    assert "nothing was changed" in lines[-1]


def test_child_log_lines_are_quoted_under_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    from areal.cli.failures import report

    report(TargetFailed("engine/0 died", detail="CUDA out of memory\nsecond", hint="areal logs model/x"), Invocation())
    assert capsys.readouterr().err == (
        "error: engine/0 died\n  | CUDA out of memory\n  | second\n  hint: areal logs model/x\n"
    )


def test_only_debug_shows_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    from areal.cli.failures import report

    def fail() -> Exception:
        try:
            raise NotFound("gone")
        except NotFound as error:
            return error

    invocation = Invocation()
    invocation.debug = True
    report(fail(), invocation)
    assert "Traceback" in capsys.readouterr().err
    invocation.debug = False
    report(fail(), invocation)
    assert capsys.readouterr().err == "error: gone\n"


def test_common_flags_work_before_and_after_verb(areal: Areal, tmp_path: object) -> None:
    before = areal("--home", f"{tmp_path}/a", "config", "path")
    after = areal("config", "path", "--home", f"{tmp_path}/a")
    assert before.out == after.out == f"{tmp_path}/a/config.yaml\n"


def test_closed_pipe_ends_command_quietly(spawn: Spawner) -> None:
    code = (
        "import sys, os; sys.argv[0] = 'areal'; read, write = os.pipe(); os.dup2(write, 1); os.close(read); "
        "os.close(write); from areal.cli.main import main; sys.exit(main())"
    )
    result = spawn("schema", "model", code=code).finish()
    assert result.code == entry._BROKEN_PIPE
    assert result.err == ""
