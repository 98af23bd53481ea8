"""Additive Gram state of a layer's inputs, its capture over loop steps and experts, and the damped factor that GPTQ runs on."""
