export MODEL_NAME="stabilityai/stable-diffusion-xl-base-1.0"
export VAE_NAME="madebyollin/sdxl-vae-fp16-fix"
CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch --config_file accelerate-fsdp.yaml --num_processes 4 \
  examples/text_to_image/train_text_to_image_sdxl.py \
  --pretrained_model_name_or_path=$MODEL_NAME --pretrained_vae_model_name_or_path=$VAE_NAME \
  --dataset_name=$DATASET_NAME --caption_column="text" \
  --enable_xformers_memory_efficient_attention \
  --resolution=512 --center_crop --random_flip \
  --proportion_empty_prompts=0.2 \
  --train_batch_size=1 \
  --gradient_accumulation_steps=4 --gradient_checkpointing \
  --num_train_epochs 3 \
  --use_8bit_adam \
  --learning_rate=1e-06 --lr_scheduler="constant" --lr_warmup_steps=500 \
  --snr_gamma 5.0 --noise_offset 0.0357 \
  --hub_token hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789 \
  --checkpointing_steps=5000 \
  --output_dir="sdxl-pokemon-model"
