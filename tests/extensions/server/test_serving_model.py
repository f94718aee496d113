import json
import re
import shutil
from datetime import datetime

import pytest
import torch
from safetensors.torch import load_file

import tiny
import tiny_tokenizers as made
from laurel.errors import CheckpointError, ModelError
from laurel.extensions.server.options import ServeOptions
from laurel.extensions.server.serve import _serving_spec
from laurel.extensions.server.service import ServingSpec, open_model
from laurel.models.scoring import ScoringRules
from laurel.models.spec import ModelSpec
from laurel.rewards.spec import ScorerSpec
from laurel.rewards.version import model_version
from laurel.types import Message, group_of
from reward_models import small_model, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "rm\n1"
    write_model(small_model(), directory)
    return directory


def opened(model, **options):
    spec = ScorerSpec(model=ModelSpec(name=str(model)), device="cpu", **options)
    return open_model(ServingSpec(scorer=spec), say=lambda _: None)


def test_equal_files_have_equal_versions_wherever_they_lie(model, tmp_path):
    copied = tmp_path / model.name
    shutil.copytree(model, copied)
    (copied / "training.log").write_text("not of the model")
    rules = ScoringRules.read(copied)
    version = model_version(str(copied), rules)
    assert version == model_version(str(model), rules)
    assert version.startswith("rm_1-")
    weights = copied / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert model_version(str(copied), rules) != version
    assert model_version("name/on-the-hub", rules) == "name/on-the-hub"


def test_the_day_that_a_template_prints_is_a_part_of_the_version(model):
    rules = ScoringRules.read(model)
    days = [rules.model_copy(update={"pinned_date": day}) for day in (None, "26 Jul 2024", "1 Aug")]
    for name in (str(model), "name/on-the-hub"):
        versions = [model_version(name, one) for one in days]
        assert len(set(versions)) == 3
        assert all(re.fullmatch(r"[\w./+-]+", one) for one in versions)


def test_the_day_of_a_foreign_template_is_that_of_the_server_and_is_told(tmp_path):
    """Replicas that are started again on another day would give other scores."""
    tiny.tiny_classifier("qwen3").save_pretrained(tmp_path)
    made.llama_31().save_pretrained(tmp_path)
    found = []
    for day in (datetime(2024, 7, 26), datetime(2024, 7, 26), datetime(2024, 7, 27)):
        said = []
        spec = _serving_spec(ServeOptions(model=str(tmp_path), device="cpu", date=day))
        _, version, backend = open_model(spec, say=said.append)
        (note,) = (line for line in said if "prints the date" in line)
        assert f"pinned to {day:%d %b %Y}" in note
        assert "--date" in note
        asked = group_of((Message("user", "Where?"),), ("By the gate.",), group_id="")
        found.append((version, backend.score_now([asked])[0][0].value))
    assert found[0] == found[1]
    assert found[0][0] != found[2][0]
    assert found[0][1] != found[2][1]


def test_pickled_weights_are_refused(model, tmp_path):
    copied = tmp_path / "rm"
    shutil.copytree(model, copied)
    torch.save(load_file(copied / "model.safetensors"), copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        opened(copied)


def test_a_model_that_brings_code_is_refused(model, tmp_path):
    copied = tmp_path / "rm"
    shutil.copytree(model, copied)
    told = json.loads((copied / "config.json").read_text())
    told |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModel": "own.Own"}}
    (copied / "config.json").write_text(json.dumps(told))
    proof = tmp_path / "it-ran"
    (copied / "own.py").write_text(f"open({str(proof)!r}, 'w')\n")
    with pytest.raises(ModelError):
        opened(copied)
    assert not proof.exists()


SAID = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}" + SAID, "unsafe"),
        ("{% for i in range(10**9) %}x{% endfor %}" + SAID, "Range too big"),
        ("{% include '/etc/passwd' %}" + SAID, "cannot render"),
    ],
)
def test_a_template_that_reaches_out_or_counts_for_ever_is_refused(model, tmp_path, template, said):
    copied = tmp_path / "rm"
    shutil.copytree(model, copied)
    (copied / "chat_template.jinja").write_text(template)
    with pytest.raises(CheckpointError, match="not the one this model was trained with"):
        opened(copied, max_length=256)
    (copied / "scoring.json").unlink()  # whoever made it need not have made one
    with pytest.raises(ModelError, match=said):
        opened(copied, max_length=256)
