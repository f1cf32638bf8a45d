//! Any bytes as a GGUF file: parsed, or refused with one line; what was parsed can be read to its last byte.
#![no_main]

use bytes::Bytes;
use formats::bytes_of;
use formats::gguf::{GgufFile, Value};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let file = match GgufFile::parse(Bytes::copy_from_slice(data)) {
        Ok(file) => file,
        Err(error) => {
            assert_eq!(error.to_string().lines().count(), 1, "{error}");
            return;
        }
    };
    for info in &file.tensors {
        let view = file.view(info).expect("a tensor of the file itself");
        assert_eq!(Some(view.bytes().len() as u64), bytes_of(info.dtype, &info.shape), "{}", info.name);
        assert!(info.bytes.start >= file.data_start && info.bytes.end <= file.len(), "{}", info.name);
    }
    for (key, value) in file.metadata.iter() {
        assert!(file.metadata.value(key).is_some(), "{key}");
        assert!(value.to_string().len() <= 16 * data.len() + 64, "{key}");
        if let Value::Array(array) = value {
            let strings = array.strings().map(Iterator::count);
            let values = array.values().map(Iterator::count);
            assert!(strings.or(values).is_none_or(|count| count == array.len()), "{key}");
        }
    }
});
