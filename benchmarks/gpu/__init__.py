"""The GPU suite: what rollspec claims on a GPU, measured on the GPU machine it is run on, in one JSON and one page.

    make gpu                              # = python3 -m benchmarks.gpu --minutes 20
    rollspec bench gpu --minutes 20
    python3 -m benchmarks.gpu --no-vllm   # device kernels and training only: needs torch and a GPU, nothing else

Without a GPU it says so and ends well, with nothing claimed. `--device cpu` runs the same code on a tiny model, so that
it is exercised without a GPU; its numbers are marked dry and claim nothing.

Files: `machine`, what is at hand; `plan`, the parts and what fits in the minutes; `suite`, runs them one by one, each
in a process of its own (`child`), and keeps what is done; `claims`, what the numbers say; `page`, shows it. The parts:
`kernels` and `training` (no vLLM), `engine` (how engines are built), `start`, `exact`, `storm`, `swaps`, `propose`,
`curve`.
"""
