"""The table of plug-ins: what is found without importing, and what is refused, with its package."""

from __future__ import annotations

import importlib
import pickle
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import laurel
from laurel import plugins
from laurel.config.data import BenchmarkSetConfig
from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config, to_yaml
from laurel.config.reward_model import RewardTrainingRun
from laurel.config.yaml_tree import Section
from laurel.data.tasks import load_task_data
from laurel.environments.registry import row_sources, shown_tools
from laurel.errors import ConfigError, DataError
from laurel.evaluation.benchmarks import BenchmarkSet, selectable
from laurel.extensions.show_config.json_schema import json_schema
from laurel.generation.load import PluggedMaker
from laurel.grpo.advantages import compute_advantages, resolve
from laurel.models.files import local_files, read_model_file
from laurel.models.loading.reward_model import find_value_head, understood
from laurel.observe.loggers import check_available
from laurel.rewards.open import open_scorer
from laurel.rewards.spec import NamedSource, ScorerSpec
from laurel.run.generator import generator_spec
from laurel.run.request import _drawing, _generation
from laurel.run.tasks import needs_of
from laurel.types import Message, group_of
from packages import installed

ROOT = Path(__file__).parents[2]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the path, where a test installs packages."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_each_of_our_own_is_declared_and_can_be_used(kind):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert plugins.names(kind) == sorted(declared[f"laurel.{kind}"])
    for name in plugins.names(kind):
        found = plugins.plugin(kind, name)
        assert isinstance(found, plugins.KINDS[kind])
        assert plugins.is_own(kind, name)
        assert type(found).__doc__


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_a_package_is_found_without_importing_it(kind, site):
    installed(site, "theirs", {"loud": "raise SystemError('imported')"}, {kind: {"x": "loud:X"}})
    assert plugins.names(kind)[-1] == "x"
    assert not plugins.is_own(kind, "x")
    assert "loud" not in sys.modules


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("raise OSError('no disk')", "cannot be imported: OSError: no disk"),
        ("import nothing_of_that_name", "ModuleNotFoundError"),
        ("", "AttributeError"),
        ("class X: ...", "no class that derives from laurel.plugins.Loss"),
        ("X = 3", "no class that derives from laurel.plugins.Loss"),
        (
            "from laurel.plugins import Loss\nclass X(Loss):\n    def __init__(self, a): ...\n"
            "    def make(self, section, settings): ...",
            "cannot be made without arguments: TypeError",
        ),
    ],
)
def test_what_cannot_be_used_names_its_package(text, what, site):
    module = f"broken_{abs(hash(text))}"
    installed(site, "their-losses", {module: text}, {"losses": {"x": f"{module}:X"}})
    with pytest.raises(ConfigError, match="their-losses") as caught:
        plugins.find(plugins.Loss, "x")
    assert what in str(caught.value)


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_one_that_lacks_a_method_is_refused_when_it_is_loaded(kind, site):
    base = plugins.KINDS[kind].__name__
    parts = {"make()": "    def make(self, section, given): ...\n"}
    if kind == "importers":
        parts |= {
            "own_keys()": "    def own_keys(self, values): ...\n",
            "title": "    title = 'X'\n",
        }
    for lacking in (None, *parts):
        module = f"{kind}_{lacking}".removesuffix("()")
        body = "".join(text for part, text in parts.items() if part != lacking)
        text = f"from laurel.plugins import {base}\nclass X({base}):\n    'X.'\n{body}"
        installed(site, f"their-{module}", {module: text}, {kind: {module: f"{module}:X"}})
    assert isinstance(plugins.plugin(kind, f"{kind}_None"), plugins.KINDS[kind])
    for lacking in parts:
        module = f"{kind}_{lacking}".removesuffix("()")
        with pytest.raises(ConfigError, match=rf"lacks {re.escape(lacking)}: ") as caught:
            plugins.plugin(kind, module)
        assert f"their-{module}" in str(caught.value)
        assert base in str(caught.value)


@pytest.mark.parametrize("name", ["ppo", "theirs"])
def test_a_name_that_is_declared_twice_is_refused(name, site):
    for package in ("first-package", "second-package"):
        installed(site, package, {}, {"losses": {name: f"{package[:5]}:X"}})
    with pytest.raises(ConfigError, match="declared twice") as caught:
        plugins.find(plugins.Loss, name)
    assert "first-package" in str(caught.value)
    assert "second-package" in str(caught.value)


NEEDS = """
from laurel.config.yaml_tree import Section
from laurel.plugins import {base}

class Needs(Section):
    "Settings without a default."
    size: int
    "The size."

class X({base}):
    "X."
    section = Needs
    made = []

    def make(self, section, given):
        self.made.append(section.size)
        return self.compare

    def compare(self, given):
        from laurel.grpo.advantages import Compared
        return Compared(values=given.values_B)
"""


@pytest.mark.parametrize(
    ("kind", "schema", "chosen", "where"),
    [
        ("losses", GRPORun, ["loss_fn.loss_type=x"], "loss_fn"),
        ("reward_losses", RewardTrainingRun, ["rm.loss.type=x"], "rm.loss"),
        ("advantages", GRPORun, ["grpo.adv_estimator.name=x"], "grpo.adv_estimator"),
        (
            "dialects",
            GRPORun,
            ["env.reward_model.urls=[http://a]", "env.reward_model.url_protocol=x"],
            "env.reward_model",
        ),
        (
            "reward_managers",
            GRPORun,
            ["env.reward_model.function={path: a:b, manager: x}"],
            "env.reward_model.function",
        ),
        ("loggers", GRPORun, ["logger.x_enabled=true"], "logger"),
    ],
)
def test_settings_without_a_default_are_asked_for_before_anything_is_loaded(
    kind, schema, chosen, where, site
):
    text = NEEDS.format(base=plugins.KINDS[kind].__name__)
    installed(site, "theirs", {f"needs_{kind}": text}, {kind: {"x": f"needs_{kind}:X"}})
    with pytest.raises(ConfigError, match=r"x\.size: Field required"):
        check_available(load_config(schema, None, chosen).config.logger)
    config = load_config(schema, None, [*chosen, f"+{where}.x.size=3"]).config
    check_available(config.logger)


def test_an_estimator_is_made_once_and_not_in_each_step(site, monkeypatch):
    text = NEEDS.format(base="Advantage")
    installed(site, "theirs", {"estimates": text}, {"advantages": {"x": "estimates:X"}})
    chosen = ["grpo.adv_estimator.name=x", "+grpo.adv_estimator.x.size=3"]
    estimator = resolve(load_config(GRPORun, None, chosen).config.grpo)
    made = sys.modules["estimates"].X.made
    assert made == [3]
    monkeypatch.setattr(plugins, "plugin", None)  # is not looked up again
    for _ in range(2):
        found = compute_advantages([[1.0, 3.0]], estimator)
        assert found.values_BG[0].tolist() == [1.0, 3.0]
    assert made == [3]


def test_a_wrong_name_says_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'cispo'"):
        plugins.find(plugins.Loss, "cipso")


def test_metadata_of_other_code_are_refused(tmp_path):
    """A copy of the code beside an older install must not lack its plug-ins without a word."""
    shutil.copytree(Path(laurel.__file__).parent, tmp_path / "laurel")
    everything = {kind: {"a": "b:C"} for kind in plugins.KINDS}
    for site, points, what in (
        ("old", everything, "is 1.0"),
        ("none", None, "is not installed"),
    ):
        (tmp_path / site).mkdir()
        if points is not None:
            installed(tmp_path / site, plugins.OWN, {}, points)
        program = "from laurel import plugins\nplugins.names('losses')"
        done = subprocess.run(
            [sys.executable, "-S", "-c", program],
            capture_output=True,
            text=True,
            env={"PYTHONPATH": f"{tmp_path}:{tmp_path / site}"},
        )
        assert what in done.stderr.splitlines()[-1], done.stderr
        assert "pip install" in done.stderr


def test_an_installed_package_declares_its_own(tmp_path, monkeypatch):
    """Without a checkout the metadata of the install count."""
    points = {kind: {"one": "a:B"} for kind in plugins.KINDS}
    installed(tmp_path, plugins.OWN, {}, points)
    info = next(tmp_path.glob("*.dist-info"))
    text = f"Metadata-Version: 2.1\nName: {plugins.OWN}\nVersion: {laurel.__version__}\n"
    (info / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    monkeypatch.setattr(plugins, "__file__", str(tmp_path / "a" / "b" / "plugins.py"))
    assert plugins.names("losses") == ["one"]


ENGINE = """
from laurel.config.yaml_tree import Section
from laurel.plugins import Engine, EngineNeeds

class Size(Section):
    "Its settings."
    ranks: int = 1
    "Devices of a replica."

class X(Engine):
    "An engine."
    section = Size

    def needs(self, section):
        return EngineNeeds(tensor_parallel_size=section.ranks, memory_share=0.5)

    def check(self, settings):
        if settings.generation.top_k == 7:
            raise ValueError("seven")

    def make(self, section, start):
        return section.ranks, start.precision, start.spec.end_ids
"""


def test_an_engine_of_a_package_is_used_by_name(site):
    installed(site, "theirs", {"an_engine": ENGINE}, {"engines": {"x": "an_engine:X"}})
    chosen = ["policy.generation.backend=x", "policy.generation.x_cfg.ranks=2"]
    run = load_config(GRPORun, None, chosen).config
    role, drawing = _generation(run), _drawing(run)
    assert (role.parallel_key, role.tp) == ("policy.generation.x_cfg", 2)
    assert (drawing.has_own_weights, drawing.memory_share) == (True, 0.5)
    start = plugins.EngineStart(
        directory=str(site), spec=generator_spec(run, (3,)), precision="float32"
    )
    maker = pickle.loads(pickle.dumps(PluggedMaker(name="x", start=start)))
    assert maker() == (2, "float32", (3,))
    for wrong, what in (
        ("policy.generation.backend=y", "backend"),
        ("policy.generation.x_cfg.rank=2", "did you mean 'ranks'"),
        ("policy.generation.top_k=7", "seven"),
        ("+env.reward_model.generation.backend=x", "computes no scores"),
    ):
        with pytest.raises(ConfigError, match=what):
            load_config(GRPORun, None, [*chosen, wrong])


def test_an_engine_that_scores_has_all_that_scoring_asks(site):
    half = ENGINE.replace("import Engine,", "import EngineThatScores,")
    half = half.replace("class X(Engine)", "class X(EngineThatScores)")
    installed(site, "theirs", {"half": half}, {"engines": {"x": "half:X"}})
    with pytest.raises(ConfigError, match=r"lacks for_judge\(\) and open_scorer\(\)"):
        load_config(GRPORun, None, ["+env.reward_model.generation.backend=x"])


KIND = """
from pydantic import Field
from laurel.config.yaml_tree import Section
from laurel.plugins import EnvironmentKind

class Game(Section):
    "One game."
    level: int = Field(default=1, ge=1)
    "How hard it is."
    form: str = "auto"
    "How calls are written."

class Games(EnvironmentKind):
    "Games, by names of your own."
    section = Game
    several = True

    def make(self, section, services):
        raise NotImplementedError

    def check(self, section, run, where):
        if section.level > run.grpo.max_rollout_turns:
            raise ValueError(f"{where}.level={section.level} takes as many turns")

    def needs(self, section):
        return ["answers"]

    def graded_by(self, section):
        return "math"

    def tools(self, section, services):
        return ({"name": services.name},)
"""


def test_several_environments_of_another_package_have_all_that_ours_have(site):
    installed(site, "their-games", {"games": KIND}, {"environments": {"games": "games:Games"}})
    given = ["env.games={chess: {level: 2}}", "grpo.max_rollout_turns=2"]
    config = load_config(GRPORun, None, given).config
    assert "chess" in config.env.names()
    assert "chess" in needs_of(config.env).answers
    (shown,) = shown_tools("chess", config.env)
    assert (shown.where, shown.schemas) == ("env.games.chess", ({"name": "chess"},))
    assert "games:\n    chess:\n      level: 2\n" in to_yaml(config)
    with pytest.raises(ConfigError, match=r"env\.games\.chess\.level=3 takes as many turns"):
        load_config(GRPORun, None, [*given, "env.games.chess.level=3"])
    with pytest.raises(ConfigError, match=r"unknown key.*did you mean 'level'"):
        load_config(GRPORun, None, ["env.games={chess: {levle: 2}}"])
    schema = json_schema("grpo")
    games = schema["$defs"]["EnvironmentsConfig"]["properties"]["games"]
    (block,) = (one for one in games["anyOf"] if one.get("type") == "object")
    (one, _) = block["additionalProperties"]["anyOf"]
    assert "level" in schema["$defs"][one["$ref"].removeprefix("#/$defs/")]["properties"]


SOURCE = """
from laurel.config.yaml_tree import Section
from laurel.plugins import ScoreSource

class Scale(Section):
    "Its settings."
    factor: float = 1.0
    "Scores are multiplied by it."

class X(ScoreSource):
    "Lengths."
    section = Scale

    def make(self, section, services):
        from fakes import WordScorer
        services.say(f"{services.where} {section.factor:g}")
        return WordScorer()
"""


def test_a_source_of_scores_of_a_package_is_used_by_name(site):
    installed(site, "theirs", {"a_source": SOURCE}, {"scorers": {"x": "a_source:X"}})
    chosen = ["data.env_name=reward_model", "env.reward_model.x.factor=2"]
    section = load_config(GRPORun, None, chosen).config.env.reward_model
    assert section.named is not None
    assert not section.loads_model
    said: list[str] = []
    spec = ScorerSpec(source=NamedSource(*section.named))
    with open_scorer(spec, say=said.append) as scorer:
        ((score,),) = scorer.score_now([group_of((Message("user", "a"),), ("b c",), group_id="g")])
    assert score.value is not None
    assert said == ["env.reward_model.x 2"]
    for wrong, what in (
        ("env.reward_model.x.facto=2", "did you mean 'factor'"),
        ("env.reward_model.model_name=m", "cannot both give the score"),
    ):
        with pytest.raises(ConfigError, match=what):
            load_config(GRPORun, None, [*chosen, wrong])


@pytest.mark.parametrize(("where", "name"), [("loss_fn", "ppo"), ("logger", "jsonl")])
def test_a_key_of_a_plug_in_without_settings_is_refused_with_its_line(where, name, tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text(f"{where}:\n  {name}: {{a: 1}}\n")
    for given in ((file,), (None, [f"{where}.{name}.a=1"])):
        with pytest.raises(ConfigError, match=rf"{where}\.{name}: the plug-in .*has no settings"):
            load_config(GRPORun, *given)
    with pytest.raises(ValueError, match="has no settings"):
        GRPORun.model_validate({where: {name: {"a": 1}}})


def test_a_source_of_scores_without_settings_is_chosen_by_an_empty_section(site):
    text = SOURCE.replace("section = Scale", "").replace("{section.factor:g}", "{section!r}")
    installed(site, "theirs", {"bare_source": text}, {"scorers": {"bare": "bare_source:X"}})
    chosen = ["data.env_name=reward_model", "env.reward_model.bare={}"]
    config = load_config(GRPORun, None, chosen).config
    assert config.env.reward_model.named == ("bare", Section())
    assert "    bare: {}\n" in to_yaml(config)
    said: list[str] = []
    open_scorer(ScorerSpec(source=NamedSource("bare", Section())), say=said.append).close()
    assert said == ["env.reward_model.bare Section()"]


NO_SECTION = """
from laurel.plugins import Loss

class X(Loss):
    "X."
    section = dict

    def make(self, section, settings): ...
"""


def test_settings_that_are_no_section_are_refused_with_their_plug_in(site):
    installed(site, "theirs", {"odd_settings": NO_SECTION}, {"losses": {"x": "odd_settings:X"}})
    for given in (["loss_fn.loss_type=x"], ["loss_fn.x.a=1"]):
        with pytest.raises(ConfigError, match=r"odd_settings:X has section = <class 'dict'>"):
            load_config(GRPORun, None, given)


def test_a_package_that_cannot_be_used_hinders_nothing_that_does_not_name_it(site):
    whole = json_schema("grpo")
    points = {kind: {"x": "does_not_load:X"} for kind in plugins.KINDS}
    installed(site, "theirs", {"does_not_load": "raise OSError('no disk')"}, points)
    schema = json_schema("grpo")
    generation = schema["$defs"]["GenerationConfig"]["properties"]
    assert "x_cfg" not in generation
    assert "x" in str(generation["backend"])
    assert generation.keys() == whole["$defs"]["GenerationConfig"]["properties"].keys()


ROWS = """
from laurel.data.tasks import MadeRows
from laurel.plugins import Rows

class X(Rows):
    "Rows."

    def make(self, chosen, environments):
        rows = [{"prompt": "a"}, {"prompt": "b", "answer": "1"}, {"answer": "2"}]
        return MadeRows(origin="theirs", rows=rows)
"""


def test_rows_of_a_package_are_what_its_base_class_says(site):
    installed(site, "theirs", {"some_rows": ROWS}, {"rows": {"x": "some_rows:X"}})
    chosen = ["data.dataset_name=x", "data.env_name=reward_model", "data.split_validation_size=0"]

    def read(*more):
        config = load_config(GRPORun, None, [*chosen, *more]).config
        return load_task_data(
            config.data,
            default_environment="reward_model",
            environments=config.env.names(),
            sources=row_sources(config.env),
        )

    tasks = list(read("data.on_bad_row=skip").train)
    assert [task.prompt[-1].content for task in tasks] == ["a", "b"]
    assert tasks[1].metadata["ground_truth"] == "1"
    with pytest.raises(DataError, match=r"x\[2\]: 'prompt'"):
        read()


BENCHMARK = """
from dataclasses import replace
from laurel.evaluation.benchmarks import benchmark_named
from laurel.plugins import BenchmarkKind

class X(BenchmarkKind):
    "Pairs that a package names."

    def make(self, section, name):
        return replace(benchmark_named("pairs"), title="Theirs", parts={})
"""


def test_a_benchmark_of_a_package_is_a_validation_set(site):
    installed(site, "theirs", {"some_pairs": BENCHMARK}, {"benchmarks": {"x": "some_pairs:X"}})
    rows = site / "rows.jsonl"
    rows.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    found = BenchmarkSet.load("Mine", BenchmarkSetConfig(benchmark="x", data_path=str(rows)))
    assert found.title == "Theirs"
    assert found.possible() == selectable("x") == ["final_score", "accuracy"]
    with pytest.raises(ValueError, match="'x'"):
        BenchmarkSetConfig(benchmark="y")


MODELS = """
from pathlib import Path
from laurel.plugins import ForeignHead, HeadFormat, ModelFiles, ReadModel

class Toy(ModelFiles):
    "Files of a toy."
    def make(self, section, file):
        return ReadModel(directory=Path(file.name).parent / "made", notes=(file.key,), about="toy")

class ToyHead(ForeignHead):
    program, is_apart = "Toy", False
    def describe(self): return "made by Toy"
    def settle_tokenizer(self, tokenizer, notes): pass
    def put_into(self, classifier, *, keeps_bias): return 0.0

class ToyForm(HeadFormat):
    "Heads of a toy."
    understood = "Toy (toy in config.json)"
    def make(self, section, saved):
        return ToyHead() if "toy" in saved.config else None
"""


def test_models_of_a_package_are_read(site):
    kinds = {"model_files": {"toy": "toy_models:Toy"}, "heads": {"toy": "toy_models:ToyForm"}}
    installed(site, "theirs", {"toy_models": MODELS}, kinds)
    assert local_files("a/m.TOY") == str(Path("a/made"))
    assert read_model_file("a/m.toy", key="policy.model_name").notes == ("policy.model_name",)
    assert local_files("a/m.other") == "a/m.other"
    (site / "config.json").write_text('{"toy": true}')
    head = find_value_head(site)
    assert head is not None
    assert head.describe() == "made by Toy"
    assert understood().endswith("; Toy (toy in config.json)")
