"""What is to be found in every denoiser that diffusers 0.42 exports, and what it is built from."""

from __future__ import annotations

from typing import Any, Final

# Class → its repeated blocks, built from its default config.
BLOCKS: Final[dict[str, str]] = {
    "AceStepTransformer1DModel": "AceStepTransformerBlock",
    "AllegroTransformer3DModel": "AllegroTransformerBlock",
    "AnyFlowFARTransformer3DModel": "AnyFlowTransformerBlock",
    "AnyFlowTransformer3DModel": "AnyFlowTransformerBlock",
    "AudioLDM2UNet2DConditionModel": "Downsample2D ResnetBlock2D Transformer2DModel Upsample2D",
    "AuraFlowTransformer2DModel": "AuraFlowJointTransformerBlock AuraFlowSingleTransformerBlock",
    "BriaFibo2Transformer2DModel": "BriaFibo2PerceiverLayer BriaFibo2TransformerBlock",
    "BriaFiboTransformer2DModel": "BriaFiboSingleTransformerBlock BriaFiboTransformerBlock",
    "BriaTransformer2DModel": "BriaSingleTransformerBlock BriaTransformerBlock",
    "ChromaTransformer2DModel": (
        "ChromaSingleTransformerBlock ChromaTransformerBlock PixArtAlphaTextProjection"
    ),
    "ChronoEditTransformer3DModel": "WanTransformerBlock",
    "CogVideoXTransformer3DModel": "CogVideoXBlock",
    "CogView3PlusTransformer2DModel": "CogView3PlusTransformerBlock",
    "CogView4Transformer2DModel": "CogView4TransformerBlock",
    "ConsisIDTransformer3DModel": "ConsisIDBlock",
    "Cosmos3OmniTransformer": "Cosmos3VLTextMoTDecoderLayer",
    "CosmosTransformer3DModel": "CosmosTransformerBlock",
    "DiTTransformer2DModel": "BasicTransformerBlock",
    "DreamLiteUNetModel": (
        "BasicTransformerBlockDreamLite Downsample2D ResnetBlock2DDreamLite Upsample2D"
    ),
    "ErnieImageTransformer2DModel": "ErnieImageSharedAdaLNBlock",
    "Flux2Transformer2DModel": "Flux2SingleTransformerBlock Flux2TransformerBlock",
    "Flux3Transformer2DModel": (
        "Flux3ModeTransformerBlock Flux3Modulation Flux3SingleTransformerBlock"
    ),
    "FluxTransformer2DModel": "FluxSingleTransformerBlock FluxTransformerBlock",
    "GlmImageTransformer2DModel": "GlmImageTransformerBlock",
    "HeliosTransformer3DModel": "HeliosTransformerBlock",
    "HunyuanImageTransformer2DModel": (
        "HunyuanImageIndividualTokenRefinerBlock HunyuanImageSingleTransformerBlock "
        "HunyuanImageTransformerBlock"
    ),
    "HunyuanVideo15Transformer3DModel": (
        "HunyuanVideo15IndividualTokenRefinerBlock HunyuanVideo15TransformerBlock"
    ),
    "HunyuanVideoFramepackTransformer3DModel": (
        "HunyuanVideoIndividualTokenRefinerBlock HunyuanVideoSingleTransformerBlock "
        "HunyuanVideoTransformerBlock"
    ),
    "HunyuanVideoTransformer3DModel": (
        "HunyuanVideoIndividualTokenRefinerBlock HunyuanVideoSingleTransformerBlock "
        "HunyuanVideoTransformerBlock"
    ),
    "I2VGenXLUNet": (
        "Downsample2D ResnetBlock2D TemporalConvLayer Transformer2DModel "
        "TransformerTemporalModel Upsample2D"
    ),
    "Ideogram4Transformer2DModel": "Ideogram4TransformerBlock",
    "JoyImageEditPlusTransformer3DModel": "JoyImageEditPlusTransformerBlock",
    "JoyImageEditTransformer3DModel": "JoyImageTransformerBlock",
    "Kandinsky3UNet": "Kandinsky3AttentionBlock Kandinsky3ResNetBlock",
    "Kandinsky5Transformer3DModel": (
        "Kandinsky5TransformerDecoderBlock Kandinsky5TransformerEncoderBlock"
    ),
    "Kandinsky6SRTransformer3DModel": "Kandinsky6SRTransformerBlock",
    "Kandinsky6Transformer3DModel": (
        "Kandinsky6FusedTransformerDecoderBlock Kandinsky6TransformerEncoderBlock"
    ),
    "Krea2Transformer2DModel": "Krea2TextFusionBlock Krea2TransformerBlock",
    "LTX2VideoTransformer3DModel": "LTX2VideoTransformerBlock",
    "LTXVideoTransformer3DModel": "LTXVideoTransformerBlock",
    "LongCatAudioDiTTransformer": "AudioDiTBlock AudioDiTConvNeXtV2Block",
    "LongCatImageTransformer2DModel": (
        "LongCatImageSingleTransformerBlock LongCatImageTransformerBlock"
    ),
    "Lumina2Transformer2DModel": "Lumina2TransformerBlock",
    "MiniMaxH3Transformer3DModel": "MiniMaxH3TokenRefinerBlock MiniMaxH3TransformerBlock",
    "MiniMaxMusic3Transformer1DModel": "MiniMaxMusic3TransformerBlock",
    "MochiTransformer3DModel": "MochiTransformerBlock",
    "MotifVideoTransformer3DModel": "MotifVideoSingleTransformerBlock MotifVideoTransformerBlock",
    "NucleusMoEImageTransformer2DModel": "NucleusMoEImageTransformerBlock",
    "OvisImageTransformer2DModel": "OvisImageSingleTransformerBlock OvisImageTransformerBlock",
    "PRXTransformer2DModel": "PRXBlock",
    "PixArtTransformer2DModel": "BasicTransformerBlock",
    "PriorTransformer": "BasicTransformerBlock",
    "QwenImage21Transformer2DModel": "QwenImage21TransformerBlock",
    "QwenImageTransformer2DModel": "QwenImageTransformerBlock",
    "RFD4ProteinaTransformer": "RFD4ProteinaPairUpdate RFD4ProteinaTrunkLayer",
    "SD3Transformer2DModel": "JointTransformerBlock",
    "SanaTransformer2DModel": "SanaTransformerBlock",
    "SanaVideoTransformer3DModel": "SanaVideoTransformerBlock",
    "SanaWMLTX2RefinerTransformer3DModel": "SanaWMLTX2RefinerTransformerBlock",
    "SanaWMTransformer3DModel": "SanaVideoMSCamCtrlBlock",
    "SkyReelsV2Transformer3DModel": "SkyReelsV2TransformerBlock",
    "StableAudio3DiTModel": "StableAudio3DiTBlock",
    "StableAudioDiTModel": "StableAudioDiTBlock",
    "StableCascadeUNet": "SDCascadeAttnBlock SDCascadeResBlock",
    "UNet1DModel": "ResConvBlock SelfAttention1d",
    "UNet2DConditionModel": "BasicTransformerBlock Downsample2D ResnetBlock2D Upsample2D",
    "UNet2DModel": "Attention Downsample2D ResnetBlock2D Upsample2D",
    "UNet3DConditionModel": (
        "Downsample2D ResnetBlock2D TemporalConvLayer Transformer2DModel "
        "TransformerTemporalModel Upsample2D"
    ),
    "UNetControlNetXSModel": "ResnetBlock2D Transformer2DModel",
    "UNetMotionModel": (
        "AnimateDiffTransformer3D Downsample2D ResnetBlock2D Transformer2DModel Upsample2D"
    ),
    "UNetSpatioTemporalConditionModel": (
        "Downsample2D SpatioTemporalResBlock TransformerSpatioTemporalModel Upsample2D"
    ),
    "UVit2DModel": "BasicTransformerBlock ConvNextBlock SkipFFTransformerBlock",
    "WanAnimate2Transformer3DModel": "WanAnimate2TransformerBlock",
    "WanAnimateTransformer3DModel": "WanAnimateFaceBlockCrossAttention WanTransformerBlock",
    "WanTransformer3DModel": "WanTransformerBlock",
    "WanVACETransformer3DModel": "WanTransformerBlock WanVACETransformerBlock",
    "ZImageTransformer2DModel": "ZImageTransformerBlock",
}

# Whose default config builds nothing, with the values of a published model that matter.
PUBLISHED: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "HiDreamImageTransformer2DModel": (
        {
            "caption_channels": [4096, 4096],
            "in_channels": 16,
            "text_emb_dim": 2048,
            "llama_layers": [*range(32), *[31] * 16],
            "max_resolution": [128, 128],
            "axes_dims_rope": [64, 32, 32],
            "attention_head_dim": 128,
            "patch_size": 2,
        },
        "HiDreamBlock",
    ),
    "HunyuanDiT2DModel": (
        {
            "attention_head_dim": 88,
            "hidden_size": 1408,
            "in_channels": 4,
            "patch_size": 2,
            "mlp_ratio": 4.3637,
            "num_attention_heads": 16,
            "num_layers": 40,
            "sample_size": 128,
            "activation_fn": "gelu-approximate",
        },
        "HunyuanDiTBlock",
    ),
    "LatteTransformer3DModel": (
        {
            "attention_head_dim": 72,
            "caption_channels": 4096,
            "cross_attention_dim": 1152,
            "in_channels": 4,
            "num_layers": 28,
            "out_channels": 8,
            "patch_size": 2,
            "sample_size": 64,
            "norm_type": "ada_norm_single",
            "num_embeds_ada_norm": 1000,
            "norm_elementwise_affine": False,
        },
        "BasicTransformerBlock",
    ),
    "LuminaNextDiT2DModel": (
        {"num_attention_heads": 32, "num_kv_heads": 8, "num_layers": 24},
        "LuminaNextDiTBlock",
    ),
    "EasyAnimateTransformer3DModel": (
        {"patch_size": 2, "in_channels": 16, "out_channels": 16},
        "EasyAnimateTransformerBlock",
    ),
    "OmniGenTransformer2DModel": (
        {"rope_scaling": {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48, "type": "su"}},
        "OmniGenBlock",
    ),
}

# What cannot be built from values in a JSON file, or only as a part of another model.
NOT_BUILT: Final = {
    "DreamLiteTransformer2DModel": "a part of DreamLiteUNetModel; its channels are given by it",
    "HunyuanDiT2DControlNetModel": "a ControlNet; takes the sizes of its HunyuanDiT2DModel",
    "HunyuanDiT2DMultiControlNetModel": "takes other models, not a config",
    "Transformer2DModel": "a part of UNets; its channels are given by them",
    "TransformerTemporalModel": "a part of UNet3DConditionModel; its channels are given by it",
}
