"""Scale-QLoRA as a PEFT method; merge."""
