"""Text: `qwen_vocabulary`, `hub` (is it in reach) and `tokenizer` (ids); `pieces`, `jinja_template`
and `chat_templates` (conversation -> pieces), `qwen_templates` (those of the families) and
`template_proof` (that a checkpoint's was cut rightly); `builtin_tokenizer` (transformers' own, of
the built-in vocabulary). May import: samples.
"""
