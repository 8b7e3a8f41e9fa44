accelerate launch --mixed_precision bf16 --num_cpu_threads_per_process 1 \
  sd-scripts/flux_train_network.py \
  --pretrained_model_name_or_path "/models/unet/flux1-dev.safetensors" \
  --clip_l "/models/clip/clip_l.safetensors" --t5xxl "/models/clip/t5xxl_fp16.safetensors" \
  --ae "/models/vae/ae.safetensors" --cache_latents_to_disk --sdpa --seed 42 \
  --gradient_checkpointing --mixed_precision bf16 --save_precision bf16 \
  --network_module networks.lora_flux --network_dim 4 --network_train_unet_only \
  --optimizer_type adafactor \
  --optimizer_args "relative_step=False" "scale_parameter=False" "warmup_init=False" \
  --lr_scheduler constant_with_warmup --max_grad_norm 0.0 --learning_rate 8e-4 \
  --cache_text_encoder_outputs --fp8_base --max_train_epochs 16 --resolution 512 \
  --train_data_dir /data/robots --caption_extension .txt --sample_prompts prompts.txt \
  --sample_every_n_steps 100 --output_dir "/outputs" --output_name tin-robots \
  --timestep_sampling shift --discrete_flow_shift 3.1582 --model_prediction_type raw \
  --guidance_scale 1 --loss_type l2
