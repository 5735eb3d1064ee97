"""Run something and record it: the HF forward, the live SGLang server. The only place that may import either."""
