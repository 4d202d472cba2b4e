"""Likelihoods of texts under a masked diffusion model: a lower bound, and how well it is known.

A masked diffusion model predicts any masked tokens of a text from the others, so it gives a text's probability in as
many ways as there are orders to fill it in. Of n tokens l are masked, l uniform in 1..n and the set uniform:

    log p(x | prompt) >= E over l and the set of [ n / l  sum over masked i of log p(x_i | prompt, what is not masked) ]

(the ELBO as LLaDA estimates it: arXiv 2502.09992, Eq. 6). A block diffusion model has that bound for each block given
the clean blocks before it, and the sum of them is a bound for the text.

| file | what |
|---|---|
| `settings.py` | what may be set |
| `patterns.py` | which tokens are masked, and with which weight they count |
| `reading.py` | the passes: a canvas, or blocks beside the clean text |
| `estimate.py` | the bound of one text, its standard error, its tokens' parts |
"""
