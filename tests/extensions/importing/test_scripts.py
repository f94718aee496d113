"""Scripts are imported as the command lines that bash makes of them, and start nothing."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from imported_sources import imported
from laurel.errors import ConfigError
from laurel.extensions.importing import scripts, shell
from laurel.extensions.importing.rules import Imported
from laurel.sandbox.inside_process import SandboxStartError
from reward_servers import wait_until

LINE = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=t.parquet "
    "data.val_files=v.parquet data.train_batch_size=64 actor_rollout_ref.model.path=my/model "
    "actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.rollout.name=vllm "
    "actor_rollout_ref.rollout.n=5"
)
# Each line of the script sets one key in another way; the command line has what bash makes of it.
EVERY_WAY = r"""
set -euo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    # engine settings (see docs)
    actor_rollout_ref.rollout.temperature=0.8
)
ROLLOUT+=(
    actor_rollout_ref.rollout.n=4
)
if [ "$DEVICE" = gpu ]; then
    lr=2e-6
else
    lr=5e-5
fi
case ${SIZE:-small} in
    small) steps=11 ;;
    *) steps=99 ;;
esac
ulimit -n 99999999
mkdir -p "$HOME/nowhere" logs
learn() {
    local length=$((256 * 2))
    python3 -m verl.trainer.main_ppo "${COMMON[@]}" "${ROLLOUT[@]}" \
        data.max_response_length=$length "$@" 2>&1 | tee logs/run.log
}
IFS=' ' read -r -a COMMON <<< "$(cat <<EOF
algorithm.adv_estimator=grpo data.train_files=t.parquet data.val_files=v.parquet
EOF
) data.train_batch_size=64 actor_rollout_ref.model.path=my/model"
MODEL_NAME=$(basename my/Qwen-7B | tr '[:upper:]' '[:lower:]')
learn actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.optim.lr=$lr \
    trainer.total_training_steps=$steps trainer.experiment_name="${MODEL_NAME,,}"-$DEVICE \
    actor_rollout_ref.rollout.n=5 trainer.logger='["console","wandb"]' # the last n counts
"""
ITS_LINE = (
    f"{LINE} actor_rollout_ref.rollout.temperature=0.8 actor_rollout_ref.actor.optim.lr=2e-6 "
    "trainer.total_training_steps=11 data.max_response_length=512 "
    'trainer.experiment_name=qwen-7b-gpu \'trainer.logger=["console","wandb"]\''
)


def script(directory: Path, text: str) -> Imported:
    return imported(directory, text, "run.sh").imported


def lost(found: Imported) -> dict[str, str]:
    return {one.key: one.why for one in found.with_status("not carried")}


def test_a_script_is_imported_as_the_command_line_that_it_starts(tmp_path: Path) -> None:
    of_script, of_line = script(tmp_path, EVERY_WAY), imported(tmp_path, ITS_LINE, "a.txt").imported
    assert of_script.values == of_line.values
    assert lost(of_script) == lost(of_line)
    assert {one.key for one in of_script.entries} == {one.key for one in of_line.entries}
    assert of_script.values["grpo.num_generations_per_prompt"] == 5


def test_a_plain_line_is_read_as_bash_reads_it() -> None:
    said = "\n".join((r"""a  'b "c"' "d '\" \\" e\ f\$ [1,2] \ """, "# comment", ""))
    words = scripts._plain_command(said)
    assert words is not None
    shown = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {said}"], capture_output=True, text=True, check=True
    )
    assert words == shown.stdout.split("\0")[:-1]
    for odd in (
        "a $b",
        "a `b`",
        'a "$b"',
        "a; b",
        "a > b",
        "a *",
        "a ~",
        "a {b,c}",
        "a\nb",
        "a 'b",
    ):
        assert scripts._plain_command(odd) is None, odd


def test_what_a_script_does_not_know_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("OF_MINE", "from_outside")
    monkeypatch.setenv("MY_API_KEY", "not_to_be_seen")
    monkeypatch.setenv("MYPASSWD", "not_to_be_seen")
    # A variable that the text sets somewhere is empty, as for bash; one that it sets nowhere is
    # what the person has to say. An argument as well.
    report = imported(
        tmp_path,
        'if [ "$#" -lt 2 ]; then exit 1; fi\nout=$2\nshift 2\n[ -d /nowhere ] && MORE=x=1\n'
        f"{LINE} trainer.default_local_dir=$out/a trainer.project_name=$UNSET_ANYWHERE $MORE "
        'trainer.experiment_name="$OF_MINE" trainer.nnodes=$(nvidia-smi -L) '
        'data.seed=$MY_API_KEY trainer.val_only=$MYPASSWD "$@"',
        "run.sh",
    )
    told = lost(report.imported)
    assert "no value of argument 2" in told["trainer.default_local_dir"]
    assert "no value of UNSET_ANYWHERE" in told["trainer.project_name"]
    assert "the output of nvidia-smi" in told["trainer.nnodes"]
    assert "no value of MY_API_KEY" in told["data.seed"]
    assert "no value of MYPASSWD" in told["trainer.val_only"]
    assert "no program is started here" in told["nvidia-smi -L"]
    assert "OF_MINE is of the environment" in report.by
    assert report.imported.values["logger.wandb.name"] == "from_outside"
    assert "not_to_be_seen" not in str(report)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"N=$(( UNSET_ANYWHERE * $UNSET_ANYWHERE ))\n{LINE} a=$N", "no value of UNSET_ANYWHERE"),
        (f"[ $UNSET_ANYWHERE -gt 1 ] && N=1\n{LINE} a=$N", "no value of UNSET_ANYWHERE"),
        (f": ${{MODEL:?which model}}\n{LINE}", "which model"),
        (f"while :; do :; done\n{LINE}", "takes too long"),
        (f"{LINE} > /nowhere/log", "/nowhere/log"),
    ],
)
def test_a_script_that_comes_to_no_program_is_refused(
    tmp_path: Path, monkeypatch: Any, text: str, why: str
) -> None:
    if "while" in text:  # the others take what a loaded machine needs
        monkeypatch.setattr(shell, "_LONGEST_S", 0.5)
    with pytest.raises(ConfigError, match=r"(starts no training|not known here)") as raised:
        script(tmp_path, text)
    assert why in str(raised.value)
    assert "give the line that starts the training" in str(raised.value)


def test_a_second_program_is_told(tmp_path: Path) -> None:
    other = LINE.replace("train_batch_size=64", "train_batch_size=32")
    found = script(tmp_path, f"pip install trl vllm\n{LINE}\n{other}\n")
    assert found.values["grpo.num_prompts_per_step"] == 64
    assert [key for key in lost(found) if "main_ppo" in key]


def test_without_a_sandbox_a_script_is_refused_and_a_line_is_not(
    tmp_path: Path, monkeypatch: Any
) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise SandboxStartError("no landlock")

    monkeypatch.setattr(scripts, "run_script", none)
    with pytest.raises(ConfigError, match=r"no landlock.*printf '%q '"):
        script(tmp_path, EVERY_WAY)
    assert script(tmp_path, LINE).values["grpo.num_generations_per_prompt"] == 5
    # What the refusal says to do.
    printed = subprocess.run(
        ["bash", "-c", f"printf '%q ' {ITS_LINE}"], capture_output=True, text=True, check=True
    )
    assert scripts._plain_command(printed.stdout) == shlex.split(ITS_LINE)


def test_a_script_reaches_nothing(tmp_path: Path) -> None:
    outside, checkout = tmp_path / "outside", tmp_path / "checkout"
    checkout.mkdir()
    outside.write_text("kept", encoding="utf-8")
    attack = checkout / "attack.sh"
    attack.write_text(
        f"""
read -r text < {outside} && python3 read $text
for file in {outside} {checkout}/new "$HOME/new" /tmp/new-by-laurels-test; do
    echo x > "$file" && python3 wrote $file
    touch "$file"; rm -f "$file"; cp /bin/true "$file"; ln -s /bin/true "$file"
    chmod 777 "$file"
done
(echo x > /dev/tcp/127.0.0.1/22 || echo x > /dev/udp/127.0.0.1/53) && python3 connected
cat /proc/{os.getpid()}/environ && python3 environment
kill -0 {os.getpid()} && python3 signalled
for python in /usr/bin/python3 /usr/bin/perl {shlex.quote(shell.own_interpreter())}; do
    $python -c 'print(1)' && python3 started $python
done
python3 end
""",
        encoding="utf-8",
    )
    mode = outside.stat().st_mode
    run = shell.run_script(attack, environment={"HOME": str(tmp_path)}, readable=[checkout])
    assert [call.words for call in run.calls] == [("python3", "end")]
    assert outside.read_text(encoding="utf-8") == "kept"
    assert outside.stat().st_mode == mode
    assert sorted(os.listdir(tmp_path)) == ["checkout", "outside"]
    assert os.listdir(checkout) == ["attack.sh"]
    assert not os.path.lexists("/tmp/new-by-laurels-test")


def test_a_script_has_nothing_else_read_in_the_place_of_its_list(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"2\x000\0python3\0secret\0")
    calls = "$TMPDIR/../out/calls"
    replaced = f"python3 kept\nrm {calls}\nln -s {outside} {calls}\n"
    run = shell.run_script(replaced, environment={})
    assert [call.words for call in run.calls] == [("python3", "kept")]
    with pytest.raises(SandboxStartError, match="wrote into the list"):
        shell.run_script(f"printf -- '-2\\0000\\0x\\0' >> {calls}", environment={})


def test_a_script_in_a_home_or_above_it_reads_itself_alone(
    tmp_path: Path, monkeypatch: Any
) -> None:
    home, link = tmp_path / "homes" / "me", tmp_path / "link"
    (home / "checkout" / ".git").mkdir(parents=True)
    (home / ".git").mkdir()
    link.symlink_to(home)
    monkeypatch.setenv("HOME", str(link))
    for script in (home / "run.sh", tmp_path / "homes" / "run.sh"):
        assert scripts._checkout_of(script) == script
    assert scripts._checkout_of(home / "checkout" / "a" / "run.sh") == home / "checkout"


def test_a_script_has_a_limit_of_memory() -> None:
    (call,) = shell.run_script("python3 $(ulimit -v)", environment={}).calls
    assert call.words == ("python3", str(1 << 20))


@pytest.mark.slow
def test_a_script_ends_with_the_process_that_ran_it() -> None:
    name = f"ends-{os.getpid()}"
    text = (
        "import sys\nfrom laurel.extensions.importing.shell import run_script\n"
        "run_script('coproc cat; read <&${COPROC[0]}', sys.stdin.read().split(), environment={})"
    )
    with subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, text=True) as run:
        assert run.stdin is not None
        run.stdin.write(name)
        run.stdin.close()
        wait_until(lambda: "stdin.sh " + name in _processes())
        run.kill()
    wait_until(lambda: name not in _processes())


def test_what_a_script_leaves_behind_is_ended(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(shell, "_LATE_S", 0.1)
    name = f"left-{os.getpid()}"
    text = f"(exec -a {name} bash -c 'while :; do :; done') &\nsetsid true\npython3 end\n"
    run = shell.run_script(text, environment={})
    assert ("python3", "end") in [call.words for call in run.calls]
    until = time.monotonic() + 10
    while name in _processes() and time.monotonic() < until:  # killed, and not yet gone
        time.sleep(0.05)
    assert name not in _processes()


def _processes() -> str:
    return subprocess.run(
        ["ps", "-eo", "stat,args"], capture_output=True, text=True, check=True
    ).stdout
