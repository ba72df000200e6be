"""The Python of every page runs as printed, in a process of its own; CUDA has
stand-ins."""

import pytest

from megatron_gdn.hf import compare_folders
from tests.examples.commands import blocks_of, pages
from tests.processes import ROOT, imported_python

MODEL = 'hybrid_layer_pattern="G-*-"'
# Block -> a line of it. Every block of every page has one.
# Blocks of these pages run where their framework is installed: in
# tests/frameworks/*_laws.py.
FRAMEWORKS = ROOT / "docs" / "frameworks"
PAGES = [page for page in pages(ROOT) if page.parent != FRAMEWORKS]
BLOCKS = {
    "a patch": "megatron_gdn.patch_megatron()",
    "a patch with options": "megatron_gdn.patch_megatron(gdn=",
    "a patch of transformers": "patch(model)  # in place",
    "a function for --spec": "def block(config, vp_stage=None):",
    "a spec": "module=GatedDeltaNet,",
    "a model": MODEL,
    "a spec of one layer": "spec = gated_delta_net_spec(",
    "generation": "tokens = generate(model",
    "repeats": "check_repeats(forward_backward(layer",
    "graphs": "torch.cuda.CUDAGraph()",
    "graphs of layers": "leave_attention_out_of_graphs(model)",
    "heads of MTP": "config.mtp_num_layers = 2",
    "dynamic batching": "MambaInferenceStateConfig.from_model(",
    "an exchange of heads": "cp = MambaContextParallel(",
    "weights": "load_hf_weights(model",
    "transformers": "print(patch(model))",
    "a packed batch": "logits = model(input_ids",
    "shared prefixes": "packed = megatron_gdn.pack_tree(",
    "a mesh": "share = context_parallel_share(",
    "a trainer": "class CPTrainer(",
    "a trainer of one process": "Trainer(model, args, train_dataset=texts",
    "a published model": 'build_model(models.find("tiny").hf',
    "FLOPs": "step = stack.flops(",
}

A_LAYER = """
from megatron_gdn import GatedDeltaNet
layer = next(module for module in model.modules() if isinstance(module, GatedDeltaNet))
x = torch.randn({tokens}, 1, 64, device=device, requires_grad=True)
"""
MICRO_BATCHES = """
d_out = torch.randn_like(x)
micro_batches = [
    torch.tensor(offsets, dtype=torch.int32, device=device)
    for offsets in ([0, 8192], [0, 5, 64, 8000, 8192])
]
"""
BATCHES = """
tokens, positions = torch.randint(256, (1, 8193), device=device), torch.arange(8192, device=device)
batches = (
    (tokens[:, :-1], positions[None], tokens[:, 1:], torch.tensor(offsets, dtype=torch.int32))
    for offsets in ([0, 8192], [0, 5, 64, 8000, 8192])
)
for losses, mean in (forward_step(batches, model), forward_step(batches, model)):
    print(mean(losses).item())
"""
# A graph is a step that Python runs again.
STAND_INS = """
import contextlib, functools
import megatron_gdn
class Graph:
    def replay(self): step()
class Stream:
    def wait_stream(self, stream): pass
nothing = lambda *stream, **options: contextlib.nullcontext()
torch.cuda.Stream, torch.cuda.current_stream = Stream, Stream
torch.cuda.stream, torch.cuda.graph, torch.cuda.CUDAGraph = nothing, nothing, Graph
megatron_gdn.static_packed_seq_params = functools.partial(
    megatron_gdn.static_packed_seq_params, device="cpu"
)
"""
MAMBA = """
import torch
import torch.distributed as dist
from torch import nn
from megatron_gdn.context_parallel import MambaContextParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group, num_heads, head_dim, n_groups, d_state = dist.group.WORLD, 4, 2, 2, 3
inner, channels = 8, 20
mixer = nn.Module()
mixer.in_proj, mixer.out_proj = nn.Linear(5, inner + channels + num_heads), nn.Linear(inner, 5)
mixer.norm, mixer.conv1d = nn.Identity(), nn.Conv1d(channels, channels, 4, groups=channels)
mixer.dt_bias, mixer.A_log, mixer.D = (nn.Parameter(torch.randn(num_heads)) for _ in range(3))
x, y, cu_seqlens = torch.randn(3, 6, 5), torch.randn(3, 6, inner), None
"""
DOCUMENTS = """
import torch
input_ids = torch.randint(50, (1, 12))
position_ids = torch.cat([torch.arange(5), torch.arange(7)])[None]
"""
ONE_RANK = """
import os
import torch.distributed as dist
from transformers import AutoModelForCausalLM, TrainingArguments
rank = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
os.environ.update(rank, MASTER_ADDR="localhost", MASTER_PORT="0")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model, cp = AutoModelForCausalLM.from_pretrained(HF_FOLDER), 1
documents = [{"input_ids": list(range(length))} for length in (5, 7)]
args = TrainingArguments(
    "out", max_steps=1, per_device_train_batch_size=2, save_strategy="no", report_to="none",
    use_cpu=True, disable_tqdm=True,
)
"""


def block(name: str) -> str:
    blocks = blocks_of(*PAGES, language="python")
    (found,) = (block.code for block in blocks if BLOCKS[name] in block.code)
    return found


def run(code: str, folder) -> str:
    (folder / "pasted.py").write_text(code)
    return imported_python(folder / "pasted.py")


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory):
    from tests.hf.tiny_models import as_published, build

    folder = tmp_path_factory.mktemp("qwen")
    as_published(build("Qwen3_5ForCausalLM"), folder)
    return folder


def test_a_published_model_is_built_and_its_step_is_counted(tmp_path):
    parameters, mfu = run(
        block("a published model") + block("FLOPs"), tmp_path
    ).splitlines()
    assert f"# {parameters}\n" in block("a published model")
    assert mfu == "MFU 0.020"


def test_every_block_is_run_here():
    assert len(blocks_of(*PAGES, language="python")) == len(BLOCKS)
    assert len({block(name) for name in BLOCKS}) == len(BLOCKS)


@pytest.mark.slow
def test_the_model_trains_generates_and_repeats(tmp_path):
    code = (
        block("a function for --spec")
        + block("a patch with options")
        + block("a patch")
        + block("a spec")
        + block("a spec of one layer")
        + block("a model")
    )
    code += A_LAYER.format(tokens=64)
    printed = run(code + block("repeats") + block("generation"), tmp_path)
    params, loss, repeats, *checked = printed.splitlines()
    assert params == "{'linear_cp_mode': 'chunkwise', 'cp_layout': 'auto'}"
    assert float(loss) == pytest.approx(5.5, abs=0.5) and checked
    # As a page says what a line prints, so it is.
    assert "print(loss.mean().item())  # about 5.5" in block("a model")
    assert f"print(report)  # {repeats}" in block("repeats")


@pytest.mark.slow
def test_a_graph_is_replayed_for_other_documents(tmp_path):
    import torch

    code = block("a model") + A_LAYER.format(tokens=8192) + MICRO_BATCHES
    code += "" if torch.cuda.is_available() else STAND_INS
    printed = run(
        code + block("graphs") + "print(x.grad.isfinite().all().item())", tmp_path
    )
    assert printed.splitlines()[-1] == "True"


@pytest.mark.slow
def test_a_model_takes_documents_in_fixed_buffers(tmp_path):
    import torch

    code = block("a model").replace(
        "max_sequence_length=40", "max_sequence_length=8192"
    )
    code += "" if torch.cuda.is_available() else STAND_INS
    losses = run(code + block("graphs of layers") + BATCHES, tmp_path).splitlines()
    assert [float(loss) for loss in losses] == pytest.approx([5.5] * 3, abs=0.5)


@pytest.mark.slow
def test_heads_of_mtp_train_and_a_model_of_mamba2_has_a_dynamic_context(tmp_path):
    heads = block("heads of MTP")
    code = block("a model") + heads + "print(loss.mean().item())\n"
    # Megatron 0.19 takes no pattern with 'G' into its dynamic context.
    code += heads.replace("mtp_num_layers = 2", "mtp_num_layers = None").replace(
        "G-/M*/M*", "M-"
    )
    code += block("dynamic batching")
    code += "print(config.mamba_inference_state_config.ssm_states_dtype)"
    _, loss, dtype = run(code, tmp_path).splitlines()
    assert float(loss) == pytest.approx(5.5, abs=0.5) and dtype == "torch.float32"


def test_the_head_exchange_goes_around_another_mixer(tmp_path):
    code = MAMBA + block("an exchange of heads") + "print(*out.shape)"
    assert run(code, tmp_path).split() == ["3", "6", "5"]


def test_a_prompt_has_several_responses(tmp_path):
    code = block("a model") + "import megatron_gdn\n"
    code += "prompts = [torch.tensor([1, 2, 3], device=device)]\n"
    code += "responses = [[torch.tensor(x, device=device) for x in ([4, 5], [6])]]\n"
    code += block("shared prefixes") + "print([len(x) for x in per_response[0]])"
    assert run(code, tmp_path).splitlines()[-1] == "[2, 1]"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a spec", "a model", "a spec of one layer"])
def test_a_block_runs_alone(tmp_path, name):
    run(block(name), tmp_path)


def test_weights_make_the_way_there_and_back(tmp_path, hf_folder):
    folders = f"HF_FOLDER, NEW_FOLDER = {str(hf_folder)!r}, 'back'\n"
    check = "\nprint(config.hidden_dropout, config.attention_dropout)"
    assert run(folders + block("weights") + check, tmp_path).split() == ["0.0", "0.0"]
    assert list(compare_folders(hf_folder, tmp_path / "back")) == []


def test_a_patched_model_of_transformers_says_what_the_page_shows(tmp_path, hf_folder):
    code = f"HF_FOLDER = {str(hf_folder)!r}\n" + block("transformers") + DOCUMENTS
    printed = run(code + block("a packed batch") + "print(*logits.shape[:2])", tmp_path)
    patched, leaks, shape = printed.splitlines()
    shown = (ROOT / "docs" / "transformers.md").read_text()
    # The last digits of the largest output are the weights' own.
    assert patched in shown and leaks.partition(", largest output")[0] in shown
    assert shape == "1 12"


def test_the_first_screen_patches_a_model_of_transformers(tmp_path, hf_folder):
    model = f"AutoModelForCausalLM.from_pretrained({str(hf_folder)!r})"
    code = (
        f"from transformers import AutoModelForCausalLM\nmodel = {model}\n" + DOCUMENTS
    )
    code += block("a patch of transformers") + block("a packed batch")
    assert run(code + "print(*logits.shape[:2])", tmp_path).split() == ["1", "12"]


def test_a_trainer_trains_in_one_process(tmp_path, hf_folder):
    code = f"HF_FOLDER = {str(hf_folder)!r}\n"
    code += "texts = [{'input_ids': list(range(length))} for length in (5, 7, 6, 4)]\n"
    code += block("a trainer of one process")
    code += (
        "print(trainer.state.global_step, trainer.state.log_history[-1]['train_loss'])"
    )
    steps, loss = run(code, tmp_path).splitlines()[-1].split()
    assert steps == "1" and float(loss) > 1


def test_a_mesh_shares_a_batch_and_a_trainer_trains(tmp_path, hf_folder):
    code = f"HF_FOLDER = {str(hf_folder)!r}\n" + ONE_RANK + block("a mesh")
    code += "print(share['input_ids'].numel())\n"
    fresh = "model = AutoModelForCausalLM.from_pretrained(HF_FOLDER)\n"
    printed = run(code + fresh + block("a trainer"), tmp_path)
    assert printed.splitlines()[0] == "12" and "'train_loss'" in printed
