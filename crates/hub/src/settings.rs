//! Where the hub is, where its cache is, and who asks: the environment variables that other
//! programs know too.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::Error;

/// The Hugging Face hub.
const ENDPOINT: &str = "https://huggingface.co";

/// What a [`Hub`](crate::Hub) needs to know.
#[derive(Clone)]
pub struct Settings {
    /// Address of the hub, without a slash at its end.
    pub endpoint: String,
    /// The cache's folder; made when something is fetched.
    pub cache: PathBuf,
    /// Sent to the endpoint, and to nobody else.
    pub token: Option<String>,
    /// Whether the network must not be used.
    pub offline: bool,
    /// Whether the proxies that the environment names are used.
    pub proxies: bool,
    /// A file with certificates (PEM) to trust instead of those built in.
    pub certificates: Option<PathBuf>,
    /// Wait before a failed request is made again; twice as long after each further failure.
    pub pause: Duration,
}

impl Settings {
    /// From the environment: `HF_ENDPOINT`; `HF_HUB_CACHE`, else `HF_HOME`, else
    /// `XDG_CACHE_HOME`, else `HOME`; `HF_TOKEN`, else the file `HF_TOKEN_PATH`, else `token` in
    /// `HF_HOME`; `HF_HUB_OFFLINE`; `SSL_CERT_FILE`.
    ///
    /// # Errors
    /// If a variable makes no sense, or there is no home.
    pub fn from_env() -> Result<Settings, Error> {
        Settings::read(&|name| std::env::var_os(name))
    }

    fn read(variable: &dyn Fn(&str) -> Option<OsString>) -> Result<Settings, Error> {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let text = |name: &str| set(name).map(|value| value.to_string_lossy().into_owned());
        let home = set("HF_HOME").map(PathBuf::from).or_else(|| {
            let cache = set("XDG_CACHE_HOME").map(PathBuf::from);
            let cache = cache.or_else(|| Some(PathBuf::from(set("HOME")?).join(".cache")));
            Some(cache?.join("huggingface"))
        });
        let cache = set("HF_HUB_CACHE").map(PathBuf::from);
        let cache = cache.or_else(|| Some(home.as_ref()?.join("hub")));
        let cache = cache.ok_or_else(|| Error::Setting {
            name: "HF_HUB_CACHE".into(),
            what: "is not set, and neither is HOME: set one of them to a folder for models".into(),
        })?;
        let yes = |name: &str| {
            let value = text(name).unwrap_or_default().to_ascii_uppercase();
            ["1", "ON", "YES", "TRUE"].contains(&value.as_str())
        };
        Ok(Settings {
            endpoint: endpoint(text("HF_ENDPOINT"))?,
            cache,
            token: match text("HF_TOKEN") {
                Some(token) => checked("HF_TOKEN", &token)?,
                None => set("HF_TOKEN_PATH")
                    .map(PathBuf::from)
                    .or_else(|| Some(home?.join("token")))
                    .map_or(Ok(None), |path| token_of(&path))?,
            },
            offline: yes("HF_HUB_OFFLINE"),
            proxies: true,
            certificates: set("SSL_CERT_FILE").map(PathBuf::from),
            pause: Duration::from_secs(1),
        })
    }
}

fn endpoint(given: Option<String>) -> Result<String, Error> {
    let Some(given) = given else {
        return Ok(ENDPOINT.to_owned());
    };
    let address = given.trim_end_matches('/');
    if !["http://", "https://"].iter().any(|scheme| {
        address
            .strip_prefix(scheme)
            .is_some_and(|rest| !rest.is_empty())
    }) {
        return Err(Error::Setting {
            name: "HF_ENDPOINT".into(),
            what: format!("{given:?} is no address: it must begin with https:// or http://"),
        });
    }
    Ok(address.to_owned())
}

/// The token in a file, if there is one.
fn token_of(path: &Path) -> Result<Option<String>, Error> {
    match std::fs::read_to_string(path) {
        Ok(token) => checked(&path.display().to_string(), &token),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io(path, "read the token")(error)),
    }
}

/// A token that can be sent; its text is in no message.
fn checked(origin: &str, token: &str) -> Result<Option<String>, Error> {
    let token = token.trim();
    if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(Error::Setting {
            name: origin.to_owned(),
            what: "holds something that is no token: copy it again from the hub's settings page"
                .into(),
        });
    }
    Ok(Some(token.to_owned()).filter(|token| !token.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Settings, Error> {
        Settings::read(&|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn the_cache_is_where_other_programs_have_it() {
        let cache = |variables: &[(&str, &str)]| read(variables).unwrap().cache;
        let home = ("HOME", "/h");
        assert_eq!(cache(&[home]), Path::new("/h/.cache/huggingface/hub"));
        let xdg = ("XDG_CACHE_HOME", "/x");
        assert_eq!(cache(&[home, xdg]), Path::new("/x/huggingface/hub"));
        let hf = ("HF_HOME", "/f");
        assert_eq!(cache(&[home, xdg, hf]), Path::new("/f/hub"));
        let hub = ("HF_HUB_CACHE", "/c");
        assert_eq!(cache(&[home, xdg, hf, hub]), Path::new("/c"));
        assert_eq!(
            cache(&[home, ("HF_HOME", "")]),
            Path::new("/h/.cache/huggingface/hub")
        );
        assert!(read(&[]).is_err());
    }

    #[test]
    fn tokens_come_from_the_environment_or_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let home = ("HF_HOME", folder.path().to_str().unwrap());
        assert_eq!(read(&[home]).unwrap().token, None);
        std::fs::write(folder.path().join("token"), "hf_file\n").unwrap();
        assert_eq!(read(&[home]).unwrap().token.as_deref(), Some("hf_file"));
        let both = read(&[home, ("HF_TOKEN", " hf_env ")]).unwrap();
        assert_eq!(both.token.as_deref(), Some("hf_env"));
        let Err(error) = read(&[home, ("HF_TOKEN", "hf secret")]) else {
            panic!("a token with a space was taken");
        };
        assert!(!error.to_string().contains("secret"), "{error}");
    }

    #[test]
    fn endpoints_and_offline() {
        let home = ("HOME", "/h");
        let mirror = read(&[home, ("HF_ENDPOINT", "http://127.0.0.1:1/")]).unwrap();
        assert_eq!(mirror.endpoint, "http://127.0.0.1:1");
        assert!(!mirror.offline);
        assert!(read(&[home, ("HF_ENDPOINT", "mirror.example")]).is_err());
        assert!(read(&[home, ("HF_ENDPOINT", "http://")]).is_err());
        assert!(read(&[home, ("HF_HUB_OFFLINE", "true")]).unwrap().offline);
        assert!(!read(&[home, ("HF_HUB_OFFLINE", "0")]).unwrap().offline);
    }
}
