// What the fuzzers hold: properties of readers for any input. Used by the libFuzzer programs here and, with a fixed
// corpus and without libFuzzer, by tests/fuzz_corpus_test.cpp.
#pragma once

#include <crumb/error.h>

#include <cstddef>
#include <optional>
#include <span>

#include "calibrate/artefact_file.h"
#include "calibrate/pickle.h"
#include "calibrate/rotation_file.h"

namespace crumb::fuzz {

// Any bytes are an artefact or an Error, and an artefact is written as bytes that are read as the same one.
inline void artefact(std::span<const std::byte> bytes) {
    std::optional<Artefact> read;
    try {
        read = parse_artefact(bytes, "input");
    } catch (const Error&) {
        return;
    }
    const auto written = serialise(*read);
    CRUMB_ASSERT(serialise(parse_artefact(written, "output")) == written);
}

// Any bytes are a rotation file or an Error. Mutation breaks the checksums of a zip archive, behind which no pickle
// would ever be reached: bytes that begin with 'P' are a pickle alone.
inline void rotation_file(std::span<const std::byte> bytes) {
    try {
        if (!bytes.empty() && bytes[0] == std::byte('P')) {
            const pickle::Document document(bytes.subspan(1), "input");
            CRUMB_ASSERT(document.root());
        } else {
            const auto written = serialise(parse_rotation_file(bytes, "input"));
            CRUMB_ASSERT(!written.empty());
        }
    } catch (const Error&) {
    }
}

}  // namespace crumb::fuzz
