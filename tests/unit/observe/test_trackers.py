import time

from laurel.observe.loggers import TensorboardLogger


def test_tensorboard_holds_what_was_logged(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorboardLogger(tmp_path)
    first.log_config({"rm": {"seed": 42}})
    for step in (1, 2, 3):
        first.log({"train/loss": float(step), "validation-default/accuracy": 0.5}, step=step)
    first.log_table("pairs", ["prompt", "score"], [("a|b\nc", 1.5)], step=3)
    first.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
    ]
    (text,) = events.Tensors("pairs/text_summary")
    assert text.tensor_proto.string_val[0].decode() == (
        "| prompt | score |\n| --- | --- |\n| a\\|b<br>c | 1.5 |"
    )
    assert events.Tensors("config/text_summary")

    begun = int(time.time())
    while int(time.time()) == begun:  # its files are read by the second that they began in
        time.sleep(0.05)
    again = TensorboardLogger(tmp_path, resumed_step=1)
    again.log({"train/loss": 20.0}, step=2)
    again.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in events.Scalars("train/loss")] == [1.0, 20.0]
