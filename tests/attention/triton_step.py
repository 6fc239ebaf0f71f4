"""Steps for the Triton backend: as `paged.py`, with its page layout."""

from dataclasses import dataclass

import torch
from tests.attention.paged import PagedStep

from quire.attention.quantized_kv import rotate_vectors
from quire.attention.triton_paged import kv_pages
from quire.kernels.rotary import rotate
from quire.kernels.triton.attention.quantized_kv import quantize_tokens

CODE_FORMATS = (torch.int8, torch.float8_e4m3fn)


def torch_write(q, k, v, rotation, pages, slot_mapping, *, out=None, scales=None):
    """What the kernel of `test_rotary_kv_write.py` does, here without 10 ms a token."""
    if rotation is not None:
        q, k = rotate(q, k, rotation)
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    store(pages, scales, (slots // pages.shape[3], slots % pages.shape[3]), k[written], v[written])
    if pages.dtype == torch.int8:
        q = rotate_vectors(q).to(q.dtype)
    return q if out is None else out.copy_(q)


def store(pages, scales, places, k, v):
    """k, v [count, Hkv, D] to (blocks, offsets) of pages; as codes where these have scales."""
    block, offset = places
    for half, x in enumerate((k, v)):
        codes = x.to(pages.dtype) if scales is None else x
        if scales is not None:
            is_int8 = pages.dtype == torch.int8
            kept = rotate_vectors(x) if is_int8 and half == 0 else x
            codes, of_tokens = quantize_tokens(kept, torch.int8 if is_int8 else torch.float8_e4m3fn)
            scales.view(torch.bfloat16).unflatten(-1, (-1, 2))[block, :, offset, half] = of_tokens
        pages[block, half, :, offset] = codes.view(pages.dtype)


class TritonStep(PagedStep):
    """Pages are [2, Hkv, B, D], and scales behind codes."""

    def fill(self, contexts):
        for layer, spec, k, v in zip(self.layers, self.specs, self.k, self.v, strict=True):
            if spec.value_dim is not None:
                self._fill_latents(kv_pages(spec, layer).numbers, layer.group, k, contexts)
                continue
            shape = (2, spec.num_kv_heads, self.block_size, spec.head_dim)
            for i, context in enumerate(contexts):
                for number in range(-(-context // self.block_size)):
                    block = self.tables[layer.group][i][number]
                    page = layer.pages[block].view(self.dtype).view(shape)
                    first = number * self.block_size
                    count = min(self.block_size, context - first)
                    page[0, :, :count] = k[i][first : first + count].transpose(0, 1)
                    values = spec.with_zeros(v[i][first : first + count])
                    page[1, :, :count] = values.transpose(0, 1)

    def _fill_latents(self, pages, group, k, contexts):
        for i, context in enumerate(contexts):
            tokens = torch.arange(context)
            blocks = torch.tensor(self.tables[group][i])[tokens // self.block_size]
            pages[blocks, tokens % self.block_size] = k[i][:context, 0]


@dataclass
class QuantizedStep(TritonStep):
    """`dtype` is of the pages, `q_dtype` of q, k and v. The oracle attends what the reference
    quantizer leaves of K and V: what is compared is attention, not the format."""

    def _random(self, generator, *shape):
        sizes = torch.randn(*shape[:-1], 1, generator=generator).mul(0.5).exp()
        return (torch.randn(*shape, generator=generator) * sizes).to(self.q_dtype)

    def fill(self, contexts):
        for layer, spec, k, v in zip(self.layers, self.specs, self.k, self.v, strict=True):
            pages = kv_pages(spec, layer)
            for i, context in enumerate(contexts):
                tokens = torch.arange(context)
                blocks = torch.tensor(self.tables[layer.group][i])[tokens // self.block_size]
                places = blocks, tokens % self.block_size
                store(pages.numbers, pages.scales, places, k[i][:context], v[i][:context])

    def expected(self, layer, query_lens, contexts=None):
        stored = self.k, self.v
        self.k = [[self._key_left(x) for x in xs] for xs in self.k]
        self.v = [[self._left(x) for x in xs] for xs in self.v]
        try:
            return super().expected(layer, query_lens, contexts)
        finally:
            self.k, self.v = stored

    def _key_left(self, x):
        if self.dtype != torch.int8:
            return self._left(x)
        return rotate_vectors(self._left(rotate_vectors(x)).float()).double()

    def _left(self, x):
        codes, scales = quantize_tokens(x, self.dtype)
        return codes.double() * scales.double()[..., None]
