// What llama.cpp's server asks of the crumb caches of its contexts: starts of prompts, room, and what it shows of them.
#pragma once

struct server_kv_memory;

namespace crumb::llama {

// For server_set_kv_memory(); one for the whole process. Contexts whose memory is not crumb's are answered as if it had
// nothing to add. `shift`: a context that is full drops its middle, and what is behind it is computed again.
server_kv_memory& serving(bool shift);

}  // namespace crumb::llama
