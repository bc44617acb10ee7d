// Room for what is to come. Only coded blocks can run out: exact and window blocks suffice for every step (extent.cpp).
//
// A sequence that was promised a length finds its blocks there; others begin, or grow beyond what they were promised,
// only with what no promise needs. One block a sequence stays aside: all that grow without a promise may want one in the
// same step, and codes that are encoded again need a second one.
#include <algorithm>

#include "cache/state.h"

namespace crumb {
namespace {

int64_t coded_blocks(const Rules& rules, int64_t length) {
    const int64_t longest = std::min<int64_t>(length, rules.longest);
    return std::max(0, rules.encoded(int32_t(longest) - 1) / rules.page - rules.sink / rules.page);
}

int64_t held(const Cache::State& state, const Sequence& s) { return state.rules.coded(s.extent).size(); }

// What becomes free if the sequence drops all it has.
int64_t held_alone(const Cache::State& state, const Sequence& s) {
    return std::ranges::count_if(s.coded, [&](uint32_t id) { return id != kNoBlock && !state.coded.is_shared(id); });
}

// Blocks that promises to other sequences still ask for. One that begins anew drops blocks that others hold as well, and
// wants as many for itself.
int64_t owed(const Cache::State& state, const Sequence& to_others_than) {
    int64_t blocks = 0;
    for (const Sequence& s : state.sequences) {
        if (&s != &to_others_than) {
            blocks += std::max<int64_t>(0, s.promised - (s.begun ? held(state, s) : held_alone(state, s)));
        }
    }
    return blocks;
}

// The length up to which a sequence needs no more coded blocks than these.
int64_t length_of(const Rules& rules, int64_t blocks) {
    if (blocks >= coded_blocks(rules, rules.longest)) {
        return rules.longest;
    }
    const int64_t coded_end = (rules.sink / rules.page + std::max<int64_t>(0, blocks)) * rules.page;
    return std::min<int64_t>(rules.longest, coded_end + rules.recent + kPageTokens - 1);
}

}  // namespace

int64_t Cache::capacity() const {
    return capacity_of(state_->config, int64_t(state_->coded.shape().n_blocks));
}

int64_t Cache::room(uint32_t sequence) const {
    const State& state = *state_;
    const Sequence& s = state.sequences[sequence];
    return length_of(state.rules, int64_t(state.coded.available()) + held_alone(state, s) - owed(state, s) -
                                      state.config.n_sequences);
}

int64_t Cache::longest_promise() const {
    return length_of(state_->rules, state_->coded.shape().n_blocks - state_->config.n_sequences);
}

bool Cache::promise(uint32_t sequence, int64_t tokens) {
    State& state = *state_;
    Sequence& s = state.at(sequence);
    s.promised = 0;
    if (std::min<int64_t>(tokens, state.rules.longest) > room(sequence)) {
        return false;
    }
    s.promised = coded_blocks(state.rules, tokens);
    s.begun = false;
    return true;
}

void Cache::end_promise(uint32_t sequence) { state_->at(sequence).promised = 0; }

bool Cache::has_room(uint32_t sequence, int32_t tokens) const {
    const State& state = *state_;
    const Sequence& s = state.sequences[sequence];
    const int64_t length = int64_t(s.extent.length) + tokens;
    if (length > state.rules.longest) {
        return false;
    }
    const int64_t wanted = coded_blocks(state.rules, length);
    const int64_t more = wanted - held(state, s);
    return more <= 0 || wanted <= s.promised ||
           more <= int64_t(state.coded.available()) - owed(state, s) - state.config.n_sequences;
}

}  // namespace crumb
