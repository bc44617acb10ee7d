// Rows become tiles, tiles are read in ranges. Borders of ranges lie at absolute multiples of range_blocks(end) blocks,
// so the order in which a row's tokens are summed depends on its `end` and on nothing else in the step.
#include <crumb/attention.h>
#include <crumb/error.h>

#include <algorithm>

namespace crumb {

namespace {

constexpr int kLeastRangeBlocks = 16;  // 1024 tokens: merging a range costs 1 to 2 % of reading it

int blocks_to(int32_t end) { return (end + kPageTokens - 1) / kPageTokens; }

// The first row at or after `first` that cannot share the tile that begins with `first`.
size_t tile_end(std::span<const QueryRow> rows, size_t first) {
    const size_t limit = std::min(rows.size(), first + kTileRows);
    size_t last = first + 1;
    while (last < limit && rows[last].sequence == rows[first].sequence &&
           range_blocks(rows[last].end) == range_blocks(rows[first].end)) {
        last++;
    }
    return last;
}

}  // namespace

int range_blocks(int32_t end) {
    int blocks = kLeastRangeBlocks;
    while (blocks_to(end) > blocks * kMaxRanges) {
        blocks *= 2;
    }
    return blocks;
}

AttentionPlan::AttentionPlan(std::vector<QueryRow> rows, int sink) : rows_(std::move(rows)), sink_(sink) {
    CRUMB_ASSERT(sink >= 0);
    double work = 0, largest = 0;  // rows x blocks
    for (size_t first = 0, last = 0; first < rows_.size(); first = last) {
        last = tile_end(rows_, first);
        int32_t begin = rows_[first].begin, end = rows_[first].end;
        for (const QueryRow& row : std::span(rows_).subspan(first, last - first)) {
            CRUMB_ASSERT(row.begin >= 0 && row.end >= 0);
            begin = std::min(begin, row.begin);
            end = std::max(end, row.end);
        }
        const int first_block = begin / kPageTokens, end_block = std::max(first_block, blocks_to(end));
        const int size = range_blocks(end);
        const int n_ranges = std::max(1, (end_block + size - 1) / size - first_block / size);
        tiles_.push_back({.first_row = uint32_t(first),
                          .n_rows = uint32_t(last - first),
                          .first_block = uint32_t(first_block),
                          .end_block = uint32_t(end_block),
                          .range_blocks = uint32_t(size),
                          .n_ranges = uint32_t(n_ranges),
                          .first_task = n_tasks_,
                          .first_partial = n_partials_});
        const AttentionTile& tile = tiles_.back();
        n_tasks_ += tile.n_ranges;
        n_partials_ += tile.n_ranges * tile.n_rows;
        const double tile_work = double(tile.n_rows) * (tile.end_block - tile.first_block);
        work += tile_work;
        largest = std::max(largest, tile_work);
    }
    largest_share_ = work > 0 ? largest / work : 0;
}

}  // namespace crumb
