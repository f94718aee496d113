"""A learner on a GPU gives its memory back while it rests, and goes on as if it had not."""

import pytest
import torch

import learner_work as work
from laurel.config.policy import ClusterConfig, NamedCall
from laurel.models.parallel.mesh import AcrossRanks
from laurel.models.spec import ParallelShape
from laurel.training.learner_group import LearnerWorker
from laurel.workers.rendezvous import RankPlace, join, leave

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
ADAM = NamedCall(name="torch.optim.AdamW", kwargs={"lr": 1e-3})


@pytest.fixture(params=["alone", "over NCCL"])
def learner(request, tmp_path):
    directory = work.write("policy", tmp_path)
    policy = work.section("policy", directory, optimizer=ADAM)
    load = work.loader("policy", policy)
    settings = {
        "optimizer": policy.optimizer,
        "scheduler": policy.scheduler,
        "max_grad_norm": policy.max_grad_norm,
        "cluster": ClusterConfig(device="cuda"),
        "seed": 1,
        "load_reference": load,
        "shape": ParallelShape(),
    }
    if request.param == "alone":
        yield LearnerWorker(RankPlace(role="policy"), load, **settings).learner
        return
    join(RankPlace(role="policy"), "cuda")
    mesh = ParallelShape().mesh("cuda")

    def spread(*, device, mesh=None, over=mesh):
        return load(device=device, mesh=over)

    learner = LearnerWorker(RankPlace(role="policy"), spread, **settings).learner
    learner.ranks = AcrossRanks(mesh)
    yield learner
    leave()


def test_memory_comes_back_and_nothing_changes(learner):
    def step():
        cut = work.CUTS["three micro-batches"]
        return learner.update(work.micro_batches("policy", cut), work.loss("policy"))

    assert step().failure is None
    before = work.asked(learner, 3)
    held = torch.cuda.memory_allocated()
    weights = 4 * sum(p.numel() for p in learner.model.parameters())
    with learner.resting():
        freed = held - torch.cuda.memory_allocated()
        # The policy, the reference, and two moments of every weight.
        assert freed >= 4 * weights
    after = work.asked(learner, 3)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert step().failure is None
    assert not torch.equal(work.asked(learner, 1)[0], before[0])
