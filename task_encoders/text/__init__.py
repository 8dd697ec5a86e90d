"""Text: `qwen_vocabulary` and `tokenizer` (ids); `pieces` and `chat_templates` (conversation ->
pieces), `qwen_templates` (the families' own) and `template_proof` (was a checkpoint's cut
correctly?). May import: samples.
"""
