#!/bin/bash
DIT=models/wan2.2_t2v_high_noise_14B_fp16.safetensors
ARGS=(
  --task t2v-A14B
  --dit "$DIT" --vae vae.safetensors --t5 t5.pth
  --min_timestep 875 --max_timestep 1000 --preserve_distribution_shape
)
python src/musubi_tuner/wan_cache_latents.py --dataset_config videos.toml --vae vae.safetensors
python src/musubi_tuner/wan_cache_text_encoder_outputs.py --dataset_config videos.toml --t5 t5.pth
accelerate launch --num_processes 2 --mixed_precision bf16 src/musubi_tuner/wan_train_network.py \
  "${ARGS[@]}" --dataset_config videos.toml --sdpa --mixed_precision bf16 --fp8_base --fp8_scaled \
  --optimizer_type adamw8bit --learning_rate 2e-4 --gradient_checkpointing \
  --network_module networks.lora_wan --network_dim 32 --network_alpha 32 \
  --timestep_sampling shift --discrete_flow_shift 3.0 \
  --max_train_epochs 16 --save_every_n_epochs 1 --seed 42 \
  --output_dir out --output_name dancing --blocks_to_swap 20
