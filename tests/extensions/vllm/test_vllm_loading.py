"""New weights for vLLM's processes: which way they take, and what vLLM is asked on it.

No GPU is here: blocks of memory of this process stand in for shared ones, and vLLM's worker for
itself. What vLLM expects is read off its own classes where it is installed.
"""

import asyncio
import inspect
from functools import partial

import pytest
import torch
from torch.multiprocessing import reductions
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from laurel.errors import ConfigError, EngineError
from laurel.extensions.vllm.loading import Loader, WeightLoading, choose_loading
from laurel.extensions.vllm.worker import ipc_update
from laurel.generation.weights.handles import GpuHandle, SharedMemory, handle_of
from laurel.generation.weights.held import HeldDtype, as_held
from laurel.types import Weights
from vllm_engines import require_vllm

CPU = torch.device("cpu")
SENT = {
    "layers.0.up.weight": torch.randn(6, 4),
    "layers.0.odd.weight": torch.randn(3).bfloat16(),  # 6 bytes: no float32 may follow
    "layers.0.gate.bias": torch.randn(5),
    "none": torch.zeros(0, 2),
    "large": torch.randn(40, 4),
}


class Vllm:
    """Two workers, which open handles by looking the block up; it records what it is asked."""

    def __init__(self, gpus=("A", "B"), reads=None):
        self.gpus, self.reads = gpus, reads
        self.blocks, self.asked, self.came, self.opened = {}, [], {}, set()
        self.fails_at = None

    def share(self, block):
        number = len(self.blocks)
        self.blocks[number] = block
        return GpuHandle(block.numel(), b"m", block.numel(), 0, b"c", number, b"e", True)

    def memory(self, gpus, num_bytes=64):
        return SharedMemory(gpus, num_bytes=num_bytes, share=self.share)

    async def ask(self, method, *arguments):
        self.asked.append(method)
        if method == self.fails_at:
            raise RuntimeError("CUDA error: invalid resource handle")
        return [getattr(self, method)(gpu, *arguments) for gpu in self.gpus]

    def laurel_gpu(self, gpu):
        return gpu

    def laurel_read_handle(self, gpu, handles):
        return self.reads or self.blocks[handles[gpu].counter_offset].tolist()

    def init_weight_transfer_engine(self, gpu, info):
        assert info == {"packed": True}

    def start_weight_update(self, gpu): ...

    def finish_weight_update(self, gpu): ...

    def laurel_take_chunk(self, gpu, entries, handles):
        update = ipc_update(list(map(list, entries)), {g: list(h) for g, h in handles.items()})
        arguments = update["ipc_handles"][gpu]
        inspect.signature(rebuild_cuda_tensor).bind(*arguments)
        block = self.blocks[arguments[12]]
        self.opened.add(arguments[12])
        assert arguments[:4] == (torch.Tensor, block.shape, block.stride(), 0)
        assert arguments[4:6] == (torch.storage.TypedStorage, torch.uint8)
        for name, values in unpacked(block, update).items():
            self.came.setdefault(gpu, {})[name] = values.clone()


def unpacked(block, update):
    """As vLLM's `unpack_tensor` does: one value behind the other, whatever their widths."""
    parts = block[: sum(update["tensor_sizes"])].split(update["tensor_sizes"])
    columns = update["names"], update["shapes"], update["dtype_names"], parts
    return {n: p.view(getattr(torch, d)).view(s) for n, s, d, p in zip(*columns, strict=True)}


def chosen(vllm, setting="auto", visible=("A", "B", "C")):
    gpus = partial(dict.fromkeys, visible, CPU)
    return asyncio.run(choose_loading(setting, vllm.ask, visible=gpus, memory=vllm.memory))


@pytest.mark.parametrize(
    ("vllm", "visible", "why_not"),
    [
        (Vllm(gpus=(None,)), "AB", "computes on a CPU"),
        (Vllm(), "A", "does not see vLLM's GPU B"),
        (Vllm(reads=[0] * 7), "AB", "cannot open memory of this process: it read"),
    ],
)
def test_files_where_handles_do_not_serve(vllm, visible, why_not):
    found = chosen(vllm, visible=visible)
    assert (found.name, found.gpus) == ("files", {})
    assert why_not in found.reason
    assert "init_weight_transfer_engine" not in vllm.asked
    with pytest.raises(ConfigError, match=f"weight_loading=ipc: .*{why_not}"):
        chosen(vllm, "ipc", visible)


def test_a_try_that_fails_is_told_and_leaves_the_files():
    vllm = Vllm()
    vllm.fails_at = "laurel_read_handle"
    assert "RuntimeError: CUDA error: invalid resource handle" in chosen(vllm).reason


def test_handles_where_vllm_computes_on_gpus_of_this_process():
    vllm = Vllm()
    assert chosen(vllm) == WeightLoading(
        name="ipc",
        reason="vLLM computes on GPUs of this process",
        gpus={"A": CPU, "B": CPU},
    )
    assert vllm.asked == ["laurel_gpu", "laurel_read_handle", "init_weight_transfer_engine"]
    assert chosen(vllm, "files") == WeightLoading(name="files", reason="it is set")


def load(vllm, weights, **options):
    shapes = {name: tuple(tensor.shape) for name, tensor in SENT.items()}
    loading = WeightLoading(name="ipc", reason="", gpus={"A": CPU, "B": CPU})
    loader = Loader(ask=vllm.ask, loading=loading, shapes=shapes, num_bytes=0, memory=vllm.memory)

    async def work():
        async with loader.prepared(weights, **{"has_all": False, "held": None, **options}) as go:
            await go()

    asyncio.run(work())


def test_every_worker_reads_every_weight_rounded_once():
    held = HeldDtype("bfloat16", frozenset({"gate.bias"}))
    for options in ({}, {"held": held}):
        vllm = Vllm()
        load(vllm, Weights(version=3, tensors=SENT.items), **options)
        assert vllm.asked[0] == "start_weight_update"
        assert vllm.asked[-1] == "finish_weight_update"
        assert vllm.asked.count("laurel_take_chunk") == len(vllm.asked) - 2 > 2
        assert vllm.opened == set(vllm.blocks)
        expected = dict(as_held(SENT.items(), options.get("held")))
        for gpu in "AB":
            assert list(vllm.came[gpu]) == list(SENT)
            for name, tensor in expected.items():
                assert vllm.came[gpu][name].dtype == tensor.dtype
                assert torch.equal(vllm.came[gpu][name], tensor)


def test_what_is_missing_or_fails_is_told():
    vllm = Vllm()
    changing = {"large": SENT["large"]}
    load(vllm, Weights(version=3, tensors=dict, changing=changing.items), has_all=True)
    assert list(vllm.came["A"]) == ["large"]
    with pytest.raises(EngineError, match="step 4 lack 4 of the model's 5 tensors"):
        load(vllm, Weights(version=4, tensors=changing.items))
    vllm.fails_at = "laurel_take_chunk"
    with pytest.raises(EngineError, match=r"step 5 .* CUDA IPC: .*invalid .*weight_loading=files"):
        load(vllm, Weights(version=5, tensors=SENT.items))


def test_vllm_knows_the_update():
    require_vllm()
    from vllm.distributed.weight_transfer.ipc_engine import (
        IPCWeightTransferEngine,
        IPCWeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

    vllm = Vllm()
    chunk = next(vllm.memory({"A": CPU}, num_bytes=1000).chunks(SENT.items()))
    update = IPCWeightTransferUpdateInfo(**ipc_update(*chunk))
    dtypes = [getattr(torch, name) for name in update.dtype_names]
    columns = update.names, update.shapes, dtypes, update.tensor_sizes
    block = vllm.blocks[0]
    assert block.shape == update.ipc_handles["A"][1]
    found = dict(unpack_tensor(block[: sum(update.tensor_sizes)], *columns))
    assert all(torch.equal(found[name], SENT[name]) for name in update.names)
    assert IPCWeightTransferEngine.init_info_cls(packed=True).packed


def test_a_handle_that_nobody_opens_holds_no_memory(monkeypatch):
    """Torch counts a shared block as open once, from when it is shared."""
    shared = GpuHandle(8, b"memory", 8, 2, b"counter", 3, b"event", True)
    released = []
    monkeypatch.setattr(reductions, "reduce_tensor", lambda _: (None, shared.arguments(0)))
    release = staticmethod(lambda *given: released.append(given))
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", release, raising=False)
    assert handle_of(torch.zeros(8, dtype=torch.uint8)) == shared
    assert released == [(b"counter", 3)]


def test_a_handle_has_the_fields_that_torch_gives():
    """Fifteen, of which those of a plain block of bytes are known."""
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    handle = GpuHandle(8, b"memory", 8, 2, b"counter", 3, b"event", True)
    fields = dict(zip(names, handle.arguments(5), strict=True))
    assert fields["storage_device"] == 5
    assert fields["storage_handle"] == b"memory"
    assert (fields["storage_size_bytes"], fields["storage_offset_bytes"]) == (8, 2)
    assert (fields["ref_counter_handle"], fields["ref_counter_offset"]) == (b"counter", 3)
    assert (fields["event_handle"], fields["event_sync_required"]) == (b"event", True)
