"""Steps for the Triton backend: as `paged.py`, with its page layout."""

from tests.attention.paged import PagedStep


class TritonStep(PagedStep):
    """Pages are [2, Hkv, B, D]."""

    def fill(self, contexts):
        for layer, spec, k, v in zip(self.layers, self.specs, self.k, self.v, strict=True):
            shape = (2, spec.num_kv_heads, self.block_size, spec.head_dim)
            for i, context in enumerate(contexts):
                for number in range(-(-context // self.block_size)):
                    block = self.tables[layer.group][i][number]
                    page = layer.pages[block].view(self.dtype).view(shape)
                    first = number * self.block_size
                    count = min(self.block_size, context - first)
                    page[0, :, :count] = k[i][first : first + count].transpose(0, 1)
                    page[1, :, :count] = v[i][first : first + count].transpose(0, 1)
