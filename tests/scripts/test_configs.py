"""The sizes of the models that are benchmarked."""

import pytest

from scripts import configs


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("command-r7b", 8_028_033_024),
        ("falcon-h1-1.5b", 1_554_859_392),
        ("gemma-2-2b", 2_614_341_888),
        ("gemma-3-4b", 4_300_079_472),
        ("glm-4-9b", 9_400_279_040),
        ("gpt2-xl", 1_557_611_200),
        ("granite-3.1-2b", 2_533_531_648),
        ("lfm2-1.2b", 1_170_340_608),
        ("olmo-2-1b", 1_484_916_736),
        ("opt-1.3b", 1_315_758_080),
        ("phi-4-mini", 3_836_021_760),
        ("pythia-1.4b", 1_414_647_808),
        ("qwen3-vl-2b", 2_127_532_032),
        ("smollm3-3b", 3_075_098_624),
        ("starcoder2-3b", 3_030_371_328),
        ("whisper-large-v3", 1_543_490_560),
    ],
)
def test_models_have_as_many_weights_as_the_published_ones(name, published):
    model = configs.random_model(name, "meta")
    assert sum(p.numel() for p in model.parameters()) == published


def test_a_model_that_is_cut_down_keeps_layers_of_each_kind_and_little_of_its_vision():
    config = configs.config_of("qwen3.5-4b", layers=2)
    assert config.text_config.layer_types == ["linear_attention", "full_attention"]
    assert config.text_config.num_hidden_layers == config.vision_config.depth == 2
    assert configs.config_of("lfm2-1.2b", layers=2).layer_types == ["conv", "full_attention"]
    assert configs.config_of("lfm2-1.2b", layers=4).layer_types[2:] == ["full_attention", "conv"]
    assert configs.config_of("gemma-3-4b", layers=2).vision_config.num_hidden_layers == 2
    vision = configs.config_of("qwen3-vl-2b", layers=2).vision_config
    assert vision.depth == 2 and vision.deepstack_visual_indexes == [1]


def test_a_step_reads_no_weights_of_images():
    for name in ("gemma-3-4b", "qwen3-vl-2b", "qwen3.5-4b"):
        model = configs.random_model(name, "meta", layers=1)
        of_images = ("vision_tower", "visual", "multi_modal_projector")
        read = sum(
            p.nbytes
            for key, p in model.named_parameters()
            if not any(part in key for part in of_images)
        )
        assert configs.floor_bytes(model) == read


def test_a_step_reads_the_experts_that_are_chosen():
    model = configs.random_model("qwen3-30b-a3b", "meta", layers=1)
    names = dict(model.named_parameters())
    experts = sum(p.nbytes for name, p in names.items() if ".experts." in name)
    others = sum(p.nbytes for name, p in names.items() if ".experts." not in name)
    others -= model.get_input_embeddings().weight.nbytes
    assert configs.floor_bytes(model) == others + experts * 8 // 128
    # of 16 tokens, some choose the same experts
    assert others + experts * 0.6 < configs.floor_bytes(model, 16) < others + experts * 0.7
