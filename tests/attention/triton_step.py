"""Steps for the Triton backend: as `paged.py`, with its page layout."""

from dataclasses import dataclass

import torch
from tests.attention.paged import PagedStep, kv_of

from quire.attention.kv_format import rotate_vectors
from quire.attention.quantized_kv import FP8, INT8
from quire.attention.triton_paged import kv_pages
from quire.kernels.rotary import rotate

CODE_FORMATS = (torch.int8, torch.float8_e4m3fn)


def torch_write(q, k, v, rotation, pages, slot_mapping, *, out=None):
    """What the kernel of `test_rotary_kv_write.py` does, here without 10 ms a token."""
    if rotation is not None:
        q, k = rotate(q, k, rotation)
    written = slot_mapping >= 0
    slots, size = slot_mapping[written], pages.numbers.shape[3]
    store(pages, (slots // size, slots % size), k[written], v[written])
    if pages.rotates_keys:
        q = rotate_vectors(q).to(q.dtype)
    return q if out is None else out.copy_(q)


def store(pages, places, k, v):
    """k, v [count, Hkv, D] to (blocks, offsets) of pages; as codes where these have scales."""
    block, offset = places
    numbers, scales = pages.numbers, pages.scales
    for half, x in enumerate((k, v)):
        codes = x.to(numbers.dtype) if scales is None else x
        if scales is not None:
            kept = rotate_vectors(x) if pages.rotates_keys and half == 0 else x
            form = INT8 if numbers.dtype == torch.int8 else FP8
            codes, of_tokens = form.values.encode(kept)
            scales.view(torch.bfloat16).unflatten(-1, (-1, 2))[block, :, offset, half] = of_tokens
        numbers[block, half, :, offset] = codes.view(numbers.dtype)


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
                store(pages, places, k[i][:context], v[i][:context])

    def expected(self, layer, query_lens, contexts=None):
        stored = self.k, self.v
        form = kv_of(self.dtype)
        self.k = [[form.rounded_keys(x).double() for x in xs] for xs in self.k]
        self.v = [[form.values.rounded(x).double() for x in xs] for xs in self.v]
        try:
            return super().expected(layer, query_lens, contexts)
        finally:
            self.k, self.v = stored
