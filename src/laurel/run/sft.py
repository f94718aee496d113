"""Builds a run of supervised fine-tuning from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from laurel.config.sft import SFTRun
from laurel.data.conversations import DemonstrationData, Dialogue, load_demonstration_data
from laurel.data.reading import encoded, holds_out
from laurel.data.report import no_rows_left
from laurel.errors import DataError
from laurel.observe.loggers import check_available
from laurel.run.cards import facts_of_policy
from laurel.run.context import RunContext, checkpoint_parts, make_services
from laurel.run.model import (
    describe_policy,
    load_policy_to_train,
    resolve_micro_batches,
    resolve_model,
)
from laurel.run.request import epoch_notes, plan_allocation, step_order, why_not_validated
from laurel.training.stopping import Deadline, Position, Selection, select_demonstrations_by

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.models.chat import ChatFormat, Demonstration
    from laurel.training.loop import RunOutcome


def fine_tune(config: SFTRun, *, console: Console) -> RunOutcome:
    """Fine-tune a model on demonstrations (`laurel sft`) from beginning to end."""
    config = resolve_model(config, console)
    deadline = Deadline(config.checkpointing.checkpoint_must_save_by)
    check_available(config.logger)
    planned = plan_allocation(config)
    selection = demonstration_selection(config)
    with ExitStack() as stack:
        context = RunContext(config=config, console=console, stack=stack, deadline=deadline)
        context = context.with_store(selection)
        data = load_demonstration_data(config.data)
        context = resolve_micro_batches(context.with_slots(planned))
        config = context.config
        model = load_policy_to_train(
            context,
            seed=config.sft.seed,
            texts=[text for dialogue in data.train for text in dialogue.texts],
        )
        facts = model.facts
        from laurel.data.forest import Batcher
        from laurel.models.chat import ChatFormat
        from laurel.training.epochs import EpochParts, total_steps
        from laurel.training.loop import Schedule
        from laurel.training.sft import SupervisedFineTuning
        from laurel.training.state import TRAINING_DATA, VALIDATION_DATA, PolicyRunState

        chat = ChatFormat(facts.tokenizer, config.policy.tokenizer.chat_template_kwargs)
        train = tokenise_dialogues(config, data, "train", chat, console)
        validation = {"default": tokenise_dialogues(config, data, "validation", chat, console)}
        validation = {name: rows for name, rows in validation.items() if rows}
        rows = {
            TRAINING_DATA: _fingerprint(train, data.train),
            VALIDATION_DATA: _fingerprint(
                [row for some in validation.values() for row in some], data.validation
            ),
        }
        card = facts_of_policy(
            context, facts, data.reports, method="fine-tuning", settings={"seed": config.sft.seed}
        )
        state = PolicyRunState(model.learner, checkpoint_parts(context, facts, card), rows)
        position = state.restore(context.resume_from) if context.resume_from else Position()
        describe_policy(context, facts, data.reports, state.run_dir)
        order = step_order(config, len(train))
        num_steps = total_steps(config.sft, order)
        for note in epoch_notes(config.policy, len(train), num_steps):
            console.print(f"note    {note}")
        schedule = Schedule(
            section=config.sft,
            saving=config.checkpointing,
            total_steps=num_steps,
            has_validation=bool(validation),
        )
        services = make_services(
            context,
            schedule=schedule,
            state=state,
            position=position,
            facts=facts,
            reports=data.reports,
            unit="rows",
        )
        learner, pad_id = model.learner, facts.tokenizer.pad_token_id or 0
        limits = config.policy.batch_limits
        parts = EpochParts(
            learner=learner,
            batcher=Batcher(
                facts.path,
                limits,
                pad_id=pad_id,
                dp_size=learner.dp_size,
            ),
            train=train,
            order=order,
            validation=validation,
        )
        return SupervisedFineTuning(config.sft, services, parts).run(position)


def demonstration_selection(config: SFTRun) -> Selection:
    """Return how the best checkpoint of a run is chosen.

    Raises:
        ConfigError: The run does not measure what chooses it.
    """
    if not config.checkpointing.enabled:
        return Selection(key=None)
    has_sets = bool(config.data.validation_sets()) or holds_out(config.data.train_sets())
    why_not = why_not_validated(config, has_sets=has_sets)
    return select_demonstrations_by(
        config.checkpointing.metric_name,
        config.checkpointing.higher_is_better,
        sets=[] if why_not else ["default"],
        why_not=why_not,
    )


def _fingerprint(rows: Sequence[Demonstration], dialogues: Sequence[Dialogue]) -> str:
    """Return a hash of the tokens, and of the turns that rows keep out of the loss."""
    from laurel.training.state import fingerprint_of_tokens, hash_of

    tokens = fingerprint_of_tokens([row.tokens for row in rows])
    learned = [turn.learned for one in dialogues for turn in one.messages]
    return tokens if all(learned) else hash_of([tokens, str(learned)])


def tokenise_dialogues(
    config: SFTRun, data: DemonstrationData, name: str, chat: ChatFormat, console: Console
) -> list[Demonstration]:
    """Tokenize the dialogues of a set; those without an answer within the limit are left out.

    So are those that the template refuses, if `data.on_bad_row` is `skip`; the report counts all.
    """
    if name not in data.reports:
        return []
    report = data.reports[name]
    dialogues: list[Dialogue] = data.train if name == "train" else data.validation
    longest = config.data.max_input_seq_length or config.policy.max_total_sequence_length
    report.note_control_tokens(
        ((dialogue.source, [dialogue.messages]) for dialogue in dialogues), chat.control_token_in
    )

    def encode(some: Sequence[Dialogue]) -> list[Demonstration | None]:
        return [
            chat.demonstration(
                dialogue.messages,
                demonstration_id=dialogue.source,
                max_length=longest,
                only_final=config.sft.only_unmask_final,
                tools=dialogue.tools,
            )
            for dialogue in some
        ]

    rows: list[Demonstration] = []
    kept: list[Dialogue] = []
    with console.status(f"tokenising {name}"):
        for dialogue, row in encoded(
            dialogues, encode, report=report, on_bad_row=config.data.on_bad_row
        ):
            if row is None:
                report.drop("nothing to learn", dialogue.source)
            else:
                rows.append(row)
                kept.append(dialogue)
    if not rows:
        if "malformed" in report.dropped:
            raise DataError(no_rows_left(report))
        raise DataError(
            f"{name}: no conversation has an answer within {longest} tokens; raise "
            "data.max_input_seq_length"
        )
    if len(kept) < len(dialogues):
        report.describe(kept)
    report.num_truncated = sum(row.truncated for row in rows)
    report.set_lengths([max(row.tokens.lengths_G) for row in rows])
    warning = report.warning_of_cuts(len(rows), longest)
    if warning is not None:
        console.print(f"warning: {warning}")
    return rows
