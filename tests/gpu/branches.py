"""Every module of src with a branch for CUDA, and the test of this folder that runs it."""

CUDA = r"torch\.cuda\.|\.is_cuda\b|\.type == .cuda|aten\._flash_att|compiled\(flex_attention"
"""What a branch for CUDA is known by."""

BRANCHES = {
    "extensions/doctor/doctor.py": "test_branches_gpu.py::test_the_trial_passes",
    "extensions/server/model_servers.py": (
        "test_branches_gpu.py::test_served_models_sleep_on_the_policys_gpu"
    ),
    "extensions/starter/starter.py": "test_branches_gpu.py::test_a_starter_counts_the_gpus",
    "environments/reward_model_environment.py": "test_branches_gpu.py::test_replicas_score_as_one",
    "generation/transformers/batch.py": "test_branches_gpu.py::test_completions_are_the_cpus",
    "generation/transformers/engine.py": "test_branches_gpu.py::test_completions_are_the_cpus",
    "generation/transformers/static.py": "test_branches_gpu.py::test_steps_are_replayed_as_graphs",
    "generation/weights/broadcast.py": (
        "test_weight_broadcast_gpu.py::test_what_is_heard_is_what_was_told"
    ),
    "generation/weights/buckets.py": (
        "test_weight_broadcast_gpu.py::test_what_is_heard_is_what_was_told"
    ),
    "extensions/vllm/worker.py": "test_weight_handles_gpu.py::test_another_process_reads_a_chunk",
    "generation/weights/handles.py": (
        "test_weight_handles_gpu.py::test_another_process_reads_a_chunk"
    ),
    "models/checkpoint/state.py": "test_branches_gpu.py::test_random_states_come_back",
    "models/forest/attention.py": (
        "test_cascade_gpu.py::test_outputs_and_gradients_are_those_of_a_dense_mask"
    ),
    "models/forest/decoder.py": "test_learner_gpu.py::test_memory_comes_back_and_nothing_changes",
    "models/forest/lockstep.py": (
        "test_policy_gpu.py::test_a_pass_that_is_made_for_others_draws_and_changes_nothing"
    ),
    "models/forest/outputs.py": (
        "test_policy_gpu.py::test_products_of_bfloat16_are_exact_and_summed_in_float32"
    ),
    "models/forest/parts.py": "test_policy_gpu.py::test_passes_over_a_part_draw_the_same_dropout",
    "models/loading/pretrained.py": "test_branches_gpu.py::test_the_trial_passes",
    "models/forest/policy.py": (
        "test_policy_gpu.py::test_the_head_multiplies_in_the_precision_of_the_decoder"
    ),
    "models/parallel/mesh.py": "test_learner_gpu.py::test_memory_comes_back_and_nothing_changes",
    "rewards/open.py": "test_branches_gpu.py::test_replicas_score_as_one",
    "rewards/replicas.py": "test_branches_gpu.py::test_replicas_score_as_one",
    "rewards/scorer.py": "test_branches_gpu.py::test_a_scorer_sleeps_on_the_host",
    "extensions/server/replicas.py": "test_branches_gpu.py::test_replicas_of_a_server_take_turns",
    "run/model.py": "test_branches_gpu.py::test_micro_batches_ask_for_the_gpus_memory",
    "extensions/doctor/checks.py": "test_branches_gpu.py::test_the_trial_passes",
    "training/learner_group.py": "test_weight_handles_gpu.py::test_another_process_reads_a_chunk",
    "extensions/doctor/machine.py": "test_branches_gpu.py::test_the_doctor_finds_the_gpus",
    "workers/process.py": "test_branches_gpu.py::test_the_doctor_finds_the_gpus",
    "workers/rendezvous.py": "test_learner_gpu.py::test_memory_comes_back_and_nothing_changes",
}
